"""Other public implementations of Magma, where they are installed."""

import importlib
import statistics
import time
from typing import Any

import jax
import optax


def rollfast_arms() -> dict[str, optax.GradientTransformationExtraArgs]:
    """Returns rollfast's AdamW (JAX) without and with Magma.

    Raises:
      ImportError: it isn't installed, or Python is older than 3.12.
    """
    adam = importlib.import_module("rollfast.optim.adam")
    return {
        "rollfast, bare": adam.adamw(1e-3),
        "rollfast, with Magma": adam.adamw(1e-3, use_magma=True, key=jax.random.PRNGKey(0)),
    }


def torch_times(shapes: Any, rounds: int, steps: int) -> dict[str, float]:
    """Times PyTorch's fused AdamW alone and inside pytorch_optimizer's Magma.

    Args:
      shapes: tree of the parameters' shapes.
      rounds: turns of each.
      steps: timed together in a turn.

    Returns:
      The median milliseconds a step, by name.

    Raises:
      ImportError: PyTorch or pytorch_optimizer isn't installed.
    """
    torch = importlib.import_module("torch")
    wrapper = importlib.import_module("pytorch_optimizer").Magma
    gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if gpu else lambda: None

    def make(masked: bool) -> Any:
        params = [
            torch.nn.Parameter(torch.full(x.shape, 0.1, device="cuda" if gpu else "cpu"))
            for x in jax.tree.leaves(shapes)
        ]
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        adamw = torch.optim.AdamW(params, lr=1e-3, fused=True)
        return wrapper(adamw) if masked else adamw

    names = {"pytorch_optimizer, bare": False, "pytorch_optimizer, with Magma": True}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, masked in names.items():
            optimizer = make(masked)
            for _ in range(2):
                optimizer.step()
            wait()
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.step()
            wait()
            times[name].append((time.perf_counter() - start) / steps * 1e3)
            del optimizer
    return {name: statistics.median(turns) for name, turns in times.items()}
