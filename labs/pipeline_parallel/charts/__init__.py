"""What notebook 07b draws."""
