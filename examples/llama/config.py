"""Sizes of the model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama decoder and the way it is computed.

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
        attention: ``"xla"``, exact everywhere; ``"cudnn"``, flash attention for 16-bit dtypes on
            NVIDIA GPUs; or ``"splash"``, flash attention on TPUs.
        num_kv_heads: Heads K of keys and values, each for N / K heads of queries; 0 for N.
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
    num_kv_heads: int = 0

    @property
    def head_size(self) -> int:
        """Width H of a head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number K of heads of keys and values."""
        return self.num_kv_heads or self.num_heads


# The paper's sizes (GaLore's Llama family), two of Llama 3 for a pod, `nano`, which two CPU cores
# train in two minutes, and `tiny`, which shows in seconds that all works.
PRESETS = {
    "tiny": LlamaConfig(257, 32, 88, 2, 2),
    "nano": LlamaConfig(257, 128, 344, 4, 4),
    "60m": LlamaConfig(32_000, 512, 1376, 8, 8),
    "130m": LlamaConfig(32_000, 768, 2048, 12, 12),
    "350m": LlamaConfig(32_000, 1024, 2736, 16, 24),
    "1b": LlamaConfig(32_000, 2048, 5461, 32, 24),
    "8b": LlamaConfig(128_256, 4096, 14_336, 32, 32, 1e-5, 5e5, num_kv_heads=8),
    "70b": LlamaConfig(128_256, 8192, 28_672, 64, 80, 1e-5, 5e5, num_kv_heads=8),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How much a preset is trained by default.

    Attributes:
        batch_size: Sequences a step, over all devices.
        seq_len: Tokens a sequence.
        steps: Steps.
        scan_layers: Stack the layers; separate ones take long to compile where there are many.
        remat: Recompute layers; else the activations of a deep model don't fit into memory.
    """

    batch_size: int
    seq_len: int
    steps: int
    scan_layers: bool = False
    remat: bool = False


RECIPES = {
    "tiny": Recipe(8, 32, 100),
    "nano": Recipe(16, 64, 600),
    "60m": Recipe(512, 256, 10_000),
    "130m": Recipe(512, 256, 20_000),
    "350m": Recipe(512, 256, 60_000),
    "1b": Recipe(512, 256, 100_000),
    "8b": Recipe(1024, 2048, 100_000, scan_layers=True, remat=True),
    "70b": Recipe(1024, 4096, 100_000, scan_layers=True, remat=True),
}
