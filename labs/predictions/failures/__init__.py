"""Failures of large jobs: how often they come, what they cost, how often to save."""
