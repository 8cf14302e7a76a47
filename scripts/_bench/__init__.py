"""Measurements of speed: each bench prints a table, or with --json one JSON object."""
