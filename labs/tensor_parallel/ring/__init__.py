"""Attention over a sequence that is divided among ranks: one block of it (`blocks`), and how many
pairs of query and key each rank computes (`pairs`)."""
