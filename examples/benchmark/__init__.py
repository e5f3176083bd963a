"""What Magma costs: time of a step, compile time and bytes."""
