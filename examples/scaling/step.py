"""An optimizer step on a mesh, lowered from shapes alone: no array is allocated."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def lower_update(tx: optax.GradientTransformation, params: Any, specs: Any, mesh: Mesh) -> Any:
    """Lower one donated update with its application to the parameters.

    Args:
      tx: the optimizer; gets the gradient as ``grad`` too.
      params: tree of ``jax.ShapeDtypeStruct``.
      specs: tree of their PartitionSpecs; the state's moments follow it, all else is replicated.
      mesh: the mesh, Auto or Explicit, of devices that may be emulated.

    Returns:
      What ``jax.jit(...).lower`` returns.
    """
    state = jax.eval_shape(tx.init, params)
    param_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state_shardings = optax.tree.map_params(
        tx,
        lambda leaf, sharding: leaf if _is_mask(leaf) else sharding,
        state,
        param_shardings,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
        is_leaf=_is_mask,
    )

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, grad=grads)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        return jax.jit(
            step, donate_argnums=(0, 1), out_shardings=(param_shardings, state_shardings)
        ).lower(
            _placed(params, param_shardings),
            _placed(state, state_shardings),
            _placed(params, param_shardings),
        )


def _placed(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings; one sharding may stand for a whole subtree, such as all scores."""

    def place(sharding: NamedSharding, part: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(place, shardings, tree)


def _is_mask(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
