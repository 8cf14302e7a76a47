"""The pictures and tables of notebook 03."""
