"""What one rank holds through a training step, by formula and from a recorded step, in bytes."""
