"""What may change or go without notice."""
