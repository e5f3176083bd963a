"""Runs the cases of test_fused.py on an NVIDIA GPU: python tests/library/fused_on_gpu.py."""

import jax
import test_fused
from test_fused import CASES, ENDS, SLICES, assert_same_steps

from magma_optax import stacked

# Triton's root and quotient are good to two roundings, and sums there have another order.
test_fused.RTOL, test_fused.ATOL = 2e-6, 1e-7
LARGE = {"layers": (3, 70, 1000), "matrix": (300, 1030)}


def main() -> None:
    """Compares fused and plain steps."""
    if jax.default_backend() != "gpu":
        raise SystemExit(f"error: needs an NVIDIA GPU, JAX has {jax.devices()}")
    for name, case in CASES.items():
        assert_same_steps(**case)
        print(name)
    for masking, shape in ENDS:
        assert_same_steps(masking=masking, shapes={"leaf": shape})
    for masking, blocks, shape in SLICES:
        assert_same_steps(masking=masking, blocks=blocks, shapes={"leaf": shape})
    for masking in ("magma", "skip_update"):
        assert_same_steps(masking=masking, blocks=stacked(0), shapes=LARGE)
        assert_same_steps(masking=masking, shapes=LARGE)
    print("fused and plain steps agree")


if __name__ == "__main__":
    main()
