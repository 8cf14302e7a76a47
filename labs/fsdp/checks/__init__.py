"""The checks of notebook 04, one file per exercise, named after what the student writes."""
