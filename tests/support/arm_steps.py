"""An arm of an experiment takes a step, as far as shapes say; nothing is compiled."""

import chex
import jax


def assert_steps(arm, trainer):
    """Its updates have the shapes and dtypes of the parameters of the trainer's problem."""
    params, _ = trainer.problem.initial(0)
    tx = arm.build(1e-3, 0)
    updates = jax.eval_shape(lambda grads: tx.update(grads, tx.init(grads), grads)[0], params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
