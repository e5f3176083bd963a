"""Settings for every test, made before JAX is loaded."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
# Nearly all the time goes into compiling tiny programs: without LLVM's optimizations, with the
# older generator of fused kernels, and with each program in one piece, in a sixth of the time. A
# version of XLA without the older generator ignores its name. MAGMA_TEST_XLA_FLAGS="" compiles as
# users do.
_QUICK = (
    "--xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
)
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_force_host_platform_device_count=8", os.environ.get("MAGMA_TEST_XLA_FLAGS", _QUICK)]
)
_ROOT = pathlib.Path(__file__).parents[1]
# For the processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
# Shared by these and by the workers of pytest-xdist. However quick a compilation was: many tests
# compile the same programs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".jax_cache"))
# On some CPUs jaxlib 0.10.0 logs each program that it reads from the cache. That fills the pipe of
# a process that a test starts, which then waits for ever.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import gc  # noqa: E402

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


import pytest  # noqa: E402


def pytest_collection_finish():
    """What was imported stays: Python need not look through it for garbage again and again."""
    gc.freeze()


@pytest.fixture
def keys_are_used_once():
    """JAX checks while tracing that no key is used twice; that takes a sixth of the time."""
    with jax.debug_key_reuse(True):
        yield
