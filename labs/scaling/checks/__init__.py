"""The checks of notebook 06: one file for each exercise, named after it."""
