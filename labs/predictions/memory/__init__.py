"""The memory of one rank through a training step, by formula and from a recorded step, in bytes."""
