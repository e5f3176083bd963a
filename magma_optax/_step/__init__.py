"""Algorithm 1: options, state, coins, and the step itself."""
