"""Processes that are killed while they write, disks that are full, and files that were damaged."""
