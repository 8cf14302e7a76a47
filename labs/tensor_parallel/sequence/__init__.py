"""Sequence parallelism: collectives along the sequence, and what a layer sends and keeps."""
