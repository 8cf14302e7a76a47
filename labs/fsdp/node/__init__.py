"""A billion parameters on a node: its jobs, and how they are run."""
