"""What a student of notebook 07b calls or subclasses."""
