"""Llama pre-training with Magma."""
