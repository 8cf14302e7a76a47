"""The checks of notebook 00: 0.1 to 0.4 in collectives, 0.5 in script."""
