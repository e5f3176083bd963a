"""The experiments of "On Surprising Effectiveness of Masking Updates in Adaptive Optimizers"."""
