"""The pictures of notebook 08, a file for each part."""
