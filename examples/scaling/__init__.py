"""What Magma adds to a step on many devices, read from compiled programs."""
