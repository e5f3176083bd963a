"""Base optimizers that are timed, and the forms of masking around them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from examples.kit.branched_adam import BranchedAdam
from examples.kit.optimizers import direction
from examples.kit.paths import path_string
from examples.kit.soap import scale_by_soap
from magma_optax import attention_and_mlp, magma, skip_update, with_magma, with_skip_update
from magma_optax.experimental.fused import FusedAdam, fused_adam

BASES = ("adam", "adamw", "rmsprop", "muon", "soap")
MATRIX_BASES = ("muon", "soap")  # whose directions are what they cost
FORMS = (
    *("skip_update", "with_magma", "magma(grad=)", "lazy skip_update", "lazy with_magma"),
    *("fused skip_update", "fused with_magma"),
    *("branched skip_update", "branched skip_update with moments"),
)

Tx = optax.GradientTransformationExtraArgs


def base(name: str) -> Tx:
    """Returns a bare base optimizer."""
    if name == "muon":
        return optax.chain(direction("muon"), optax.scale(-1e-3))
    if name == "soap":
        kinds = {"matrix": scale_by_soap(), "other": optax.scale_by_adam()}
        return optax.chain(optax.partition(kinds, by_kind), optax.scale(-1e-3))
    return optax.with_extra_args_support(getattr(optax, name)(1e-3))


def by_kind(params: Any) -> Any:
    """Labels attention and MLP matrices, which SOAP takes; Adam takes the rest."""

    def label(path: tuple[Any, ...], leaf: Any) -> str:
        return "matrix" if attention_and_mlp(path_string(path), leaf) else "other"

    return jax.tree.map_with_path(label, params)


def forms(name: str, **masking: Any) -> dict[str, Tx]:
    """Returns a base bare and in the forms of this package."""
    plain = {
        "bare": base(name),
        "skip_update": optax.chain(base(name), skip_update(**masking)),
        "with_magma": with_magma(base(name), **masking),
        "magma(grad=)": optax.chain(base(name), magma(**masking)),
    }
    if name not in MATRIX_BASES:  # there the lazy forms are the plain ones
        return plain
    return plain | {
        "lazy skip_update": with_skip_update(base(name), **masking),
        "lazy with_magma": with_magma(base(name), lazy=True, **masking),
    }


def fused_forms(name: str, **masking: Any) -> dict[str, FusedAdam]:
    """Returns Adam's fused forms where they have kernels; elsewhere they are the plain ones."""
    if name != "adam" or jax.default_backend() != "gpu":
        return {}
    return {
        "fused skip_update": fused_adam(1e-3, masking="skip_update", **masking),
        "fused with_magma": fused_adam(1e-3, **masking),
    }


def branched_forms(name: str, **masking: Any) -> dict[str, BranchedAdam]:
    """Returns Adam's forms with a branch per leaf; none for other bases or where leaves are cut."""
    if name != "adam" or masking.pop("blocks", "leaf") != "leaf":
        return {}
    return {
        "branched skip_update": BranchedAdam(1e-3, **masking),
        "branched skip_update with moments": BranchedAdam(1e-3, moments=True, **masking),
    }


def all_forms(name: str, **masking: Any) -> dict[str, Any]:
    """Returns all of them."""
    return forms(name, **masking) | fused_forms(name, **masking) | branched_forms(name, **masking)


def chosen(txs: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the bare base and the forms of these names, or all."""
    return {form: tx for form, tx in txs.items() if not names or form in ("bare", *names)}


def update_and_apply(tx: Tx | FusedAdam | BranchedAdam) -> Callable[..., Any]:
    """Returns one step: ``params, opt_state, grads -> params, opt_state``."""
    if isinstance(tx, FusedAdam | BranchedAdam):
        return lambda params, opt_state, grads: tx.update_and_apply(grads, opt_state, params)

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params, grad=grads)
        return optax.apply_updates(params, updates), opt_state

    return step
