"""Sizes of the model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class NanoMoEConfig:
    """Shape of a GPT-2 whose layers 0, 2, 4, ... hold a mixture of experts.

    Attributes:
        vocab_size: Number of tokens V.
        length: Learned positions, the longest sequence.
        width: Width D of the residual stream; an MLP or an expert is F = 4 D wide.
        num_heads: Attention heads N; each is ``width / num_heads`` wide.
        num_layers: Layers L.
        num_experts: Experts E of a mixture.
        top_k: Experts K that a token chooses.
        train_capacity: Tokens that an expert takes in training, in units of an even share.
        valid_capacity: The same for evaluation.
        balance_weight: Weight of the load-balancing loss.
        z_weight: Weight of the router's z-loss.
        dtype: Dtype of the computation; parameters and router are always float32.
    """

    vocab_size: int
    length: int
    width: int
    num_heads: int
    num_layers: int
    num_experts: int = 8
    top_k: int = 2
    train_capacity: float = 1.25
    valid_capacity: float = 2.0
    balance_weight: float = 0.01
    z_weight: float = 0.001
    dtype: str = "float32"


# The paper's size (nanoMoE's default), `nano`, which two CPU cores train in two minutes, and
# `tiny`, which shows in seconds that all works.
PRESETS = {
    "tiny": NanoMoEConfig(257, 32, 32, 2, 2),
    "nano": NanoMoEConfig(257, 64, 96, 4, 4),
    "paper": NanoMoEConfig(50_304, 1024, 384, 6, 6),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a preset is trained by default.

    Attributes:
        batch_size: Sequences a step.
        accumulate: Micro-batches that a batch is computed in. Tokens compete for the experts'
            capacity within a micro-batch.
        seq_len: Tokens a sequence.
        steps: Steps.
        warmup: Steps of linear warm-up.
        learning_rate: Peak; None for the optimizer's in `examples.kit.optimizers`.
    """

    batch_size: int
    accumulate: int
    seq_len: int
    steps: int
    warmup: int
    learning_rate: float | None = None


RECIPES = {
    "tiny": Recipe(8, 1, 32, 100, 10),
    "nano": Recipe(16, 1, 64, 400, 40),
    "paper": Recipe(480, 40, 1024, 50_000, 2000, 6e-4),  # 491,520 tokens a step
}
