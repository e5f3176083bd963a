"""The baselines and controls that neither optax nor a maintained JAX package has.

Every ``scale_by_*`` is a direction in optax's sense: it points uphill and has no learning rate, so
``optax.chain(scale_by_x(), optax.scale_by_learning_rate(lr))`` is the optimizer. `matrices` sends
attention and MLP matrices to one direction and all else to another.

The last two axes of a leaf are its matrix; axes before them index separate matrices (scanned
layers, experts), each treated on its own.
"""
