"""What notebook 07a draws."""
