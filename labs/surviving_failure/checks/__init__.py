"""The checks of notebook 08, a file for each exercise."""
