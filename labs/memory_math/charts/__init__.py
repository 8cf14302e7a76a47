"""What notebook 01 draws: states (1.1 to 1.3), activations (1.4, 1.5) and jobs (1.6, 1.7)."""
