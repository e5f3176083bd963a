"""Where mu comes from: an EMA of its own, an estimate, or the base's state."""
