"""The checks of notebook 05: one file per exercise, named after the function that it checks."""
