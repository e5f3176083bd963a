"""ResNets for small images in Flax NNX: the first convolution keeps the resolution, nothing pools.

Shapes: B images, H x W pixels, C channels, K classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Shape of a ResNet.

    Attributes:
        blocks: Blocks of each stage. A stage after the first halves the resolution.
        width: Channels of the first stage; each further stage has twice those of the one before.
        bottleneck: Whether a block is 1x1, 3x3, 1x1 with four times the channels at its end, or
            3x3, 3x3.
        dtype: Of the computation; parameters and running statistics are float32.
    """

    blocks: tuple[int, ...]
    width: int
    bottleneck: bool
    dtype: str = "float32"


MODELS = {
    "tiny": ResNetConfig((1, 1), 8, False),
    "small": ResNetConfig((1, 1, 1), 16, False),
    "resnet50": ResNetConfig((3, 4, 6, 3), 64, True),
}
EXPANSION = 4  # of a bottleneck
HE_NORMAL = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ConvNorm(nnx.Module):
    """A convolution without bias, and batch normalisation."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, dtype: str, *, rngs: nnx.Rngs
    ):
        """Draws the kernel (size, size, inputs, outputs)."""
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            stride,
            padding=size // 2,
            use_bias=False,
            kernel_init=HE_NORMAL,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, train: bool) -> Array:
        """Maps (B, H, W, inputs) to (B, H / stride, W / stride, outputs)."""
        return self.norm(self.conv(x), use_running_average=not train)


class Block(nnx.Module):
    """A residual block, basic or bottleneck, with a projection where shapes change."""

    def __init__(
        self, inputs: int, width: int, stride: int, config: ResNetConfig, *, rngs: nnx.Rngs
    ):
        """Draws the convolutions; the first 3x3 one has the stride."""
        if config.bottleneck:
            outputs = EXPANSION * width
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            outputs = width
            shapes = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        self.layers = nnx.List([ConvNorm(*shape, config.dtype, rngs=rngs) for shape in shapes])
        self.shortcut = (
            ConvNorm(inputs, outputs, 1, stride, config.dtype, rngs=rngs)
            if stride != 1 or inputs != outputs
            else None
        )

    def __call__(self, x: Array, train: bool) -> Array:
        """Maps (B, H, W, inputs) to (B, H / stride, W / stride, outputs)."""
        out = x
        for i, layer in enumerate(self.layers):
            out = layer(jax.nn.relu(out) if i else out, train)
        return jax.nn.relu(out + (x if self.shortcut is None else self.shortcut(x, train)))


class ResNet(nnx.Module):
    """A ResNet with the stem that is usual for CIFAR: 3x3, stride 1, no pooling."""

    def __init__(self, config: ResNetConfig, channels: int, classes: int, *, rngs: nnx.Rngs):
        """Draws all parameters from `rngs`."""
        width = config.width
        self.stem = ConvNorm(channels, width, 3, 1, config.dtype, rngs=rngs)
        blocks, inputs = [], width
        for stage, count in enumerate(config.blocks):
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(Block(inputs, width << stage, stride, config, rngs=rngs))
                inputs = (width << stage) * (EXPANSION if config.bottleneck else 1)
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)  # in float32

    def __call__(self, x: Array, train: bool) -> Array:
        """Classifies images.

        Args:
            x: float (B, H, W, C).
            train: Normalise by the batch and move the running statistics, or normalise by these.

        Returns:
            Logits, float32 (B, K).
        """
        x = jax.nn.relu(self.stem(x, train))
        for block in self.blocks:
            x = block(x, train)
        return self.head(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))
