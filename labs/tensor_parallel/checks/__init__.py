"""The checks of notebook 07a: one file for each exercise, and what they share."""
