"""Pre-training of a mixture of experts with Magma."""
