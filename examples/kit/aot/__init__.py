"""Programs compiled ahead of time, for TPUs that need not be there, and what is read of them."""
