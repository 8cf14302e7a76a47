"""Thousands of public runs on real GPUs, what we predict of each, and how far off that is."""
