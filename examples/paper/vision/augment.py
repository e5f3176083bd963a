"""The usual augmentation for CIFAR: a random crop of the padded image, mirrored half the time."""

import jax
import jax.numpy as jnp
from jax import Array

PAD = 4


def crop_and_flip(key: Array, images: Array) -> Array:
    """Moves each image by up to `PAD` pixels each way, black coming in, and mirrors half of them.

    Args:
        key: Of this batch.
        images: (B, H, W, C), of any dtype.

    Returns:
        The same shape and dtype.
    """
    crop_key, flip_key = jax.random.split(key)
    padded = jnp.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    corners = jax.random.randint(crop_key, (len(images), 2), 0, 2 * PAD + 1)
    flips = jax.random.bernoulli(flip_key, shape=(len(images),))

    def one(image: Array, corner: Array, flip: Array) -> Array:
        start = (corner[0], corner[1], 0)
        cut = jax.lax.dynamic_slice(image, start, images.shape[1:])
        return jnp.where(flip, cut[:, ::-1], cut)

    return jax.vmap(one)(padded, corners, flips)
