"""Text as batches, from whatever source: see `examples.kit.data.load`."""
