"""What notebook 04 draws, one file for each part of it."""
