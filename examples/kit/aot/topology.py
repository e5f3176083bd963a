"""The devices of a TPU slice that isn't there, to compile programs for.

TPU's compiler comes with the package `libtpu` and runs on any Linux machine. It knows every slice
by its topology, such as ``v5p:4x4x8``: the generation, and how many chips there are in each
direction. (Google's names of slices, such as v5p-256, count cores on v4 and v5p, two a chip, and
chips on v5e and v6e: v5p-256 is ``v5p:4x4x8``, v5e-256 is ``v5e:16x16``.)
"""

import functools
import os
import re

import jax
from jax.experimental import topologies

from examples.kit.options import SettingsError

NAME = re.compile(r"(?P<slice>(?P<generation>\w+):\d+(x\d+)*)(,slices=(?P<count>[1-9]\d*))?")
# Without these libtpu asks the network what machine this is (which kind they name is no matter),
# and lets one process at a time use it, as if to hold a TPU.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@functools.cache
def devices(name: str) -> tuple[jax.Device, ...]:
    """Returns the devices of a topology; programs can be compiled for them, and not run.

    Args:
        name: Such as ``v5e:8x8``, or ``v5e:8x8,slices=2`` for two slices that a data centre's
            network joins. The compiler says which there are; v4, v5e, v5p, v6e and tpu7x among
            them.

    Raises:
        SettingsError: If there is no such topology, or no libtpu.
    """
    match = NAME.fullmatch(name)
    if not match:
        raise SettingsError(
            f"topology {name!r}: write GENERATION:SHAPE, such as v5p:4x4x4, or "
            "GENERATION:SHAPE,slices=COUNT"
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")  # with libtpu there, JAX would look for a TPU
    options = {"num_slices": int(match["count"])} if match["count"] else {}
    if match["generation"] == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as a v4 host shows them
    try:
        found = topologies.get_topology_desc(match["slice"], "tpu", **options)
    except RuntimeError as error:
        if "not installed" in str(error):
            raise SettingsError(
                f"topology {name!r} needs TPU's compiler, and libtpu is not installed here; run: "
                'python -m pip install -e ".[examples,tpu]"'
            ) from None
        reason = str(error).splitlines()[0]
        raise SettingsError(f"topology {name!r}: TPU's compiler refuses it: {reason}") from None
    return tuple(found.devices)


def describe(name: str) -> str:
    """Says what a topology is made of, in a few words."""
    found = devices(name)
    hosts = len({device.process_index for device in found})
    return f"{name}: {len(found)} {found[0].device_kind} devices on {hosts} host(s)"
