"""A script that torchrun restarts: what it notes, what torchrun's agent logs, and kills."""
