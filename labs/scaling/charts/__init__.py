"""What notebook 06 draws: one file for each part."""
