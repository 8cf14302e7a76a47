"""The checks of notebook 07b: one file for each exercise, and what they share."""
