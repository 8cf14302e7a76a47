"""What a student of notebook 07a calls or subclasses."""
