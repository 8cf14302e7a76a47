"""What a student of notebook 06 calls or subclasses."""
