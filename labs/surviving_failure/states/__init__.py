"""A small job of several ranks with everything that a checkpoint can forget, and what compares a
resumed one with one that was never interrupted."""
