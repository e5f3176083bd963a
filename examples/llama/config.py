"""Sizes of the model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama-2 decoder and the way it is computed.

    Attributes:
        vocab_size: Number of tokens V.
        hidden_size: Width D of the residual stream.
        intermediate_size: Width F of the SwiGLU MLP.
        num_heads: Attention heads N; each is ``hidden_size / num_heads`` wide.
        num_layers: Decoder layers L.
        rms_norm_eps: Added to the mean square in RMSNorm.
        rope_base: Base of the rotary embedding's wavelengths.
        initializer_range: Standard deviation of every matrix and embedding at the start.
        scan_layers: One stacked layer under ``lax.scan`` (compiles in constant time) instead of L
            separate ones.
        remat: Recompute each layer in the backward pass instead of keeping its activations.
        dtype: Dtype of the computation; parameters are always float32.
        attention: ``"xla"``, exact everywhere, or ``"cudnn"``, flash attention for 16-bit dtypes
            on NVIDIA GPUs.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    rms_norm_eps: float = 1e-6
    rope_base: float = 10_000.0
    initializer_range: float = 0.02
    scan_layers: bool = False
    remat: bool = False
    dtype: str = "float32"
    attention: str = "xla"


# The paper's sizes (GaLore's Llama family), `nano`, which two CPU cores train in two minutes, and
# `tiny`, which shows in seconds that all works.
PRESETS = {
    "tiny": LlamaConfig(257, 32, 88, 2, 2),
    "nano": LlamaConfig(257, 128, 344, 4, 4),
    "60m": LlamaConfig(32_000, 512, 1376, 8, 8),
    "130m": LlamaConfig(32_000, 768, 2048, 12, 12),
    "350m": LlamaConfig(32_000, 1024, 2736, 16, 24),
    "1b": LlamaConfig(32_000, 2048, 5461, 32, 24),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How much a preset is trained by default.

    Attributes:
        batch_size: Sequences a step, over all devices.
        seq_len: Tokens a sequence.
        steps: Steps.
    """

    batch_size: int
    seq_len: int
    steps: int


RECIPES = {
    "tiny": Recipe(8, 32, 100),
    "nano": Recipe(16, 64, 600),
    "60m": Recipe(512, 256, 10_000),
    "130m": Recipe(512, 256, 20_000),
    "350m": Recipe(512, 256, 60_000),
    "1b": Recipe(512, 256, 100_000),
}
