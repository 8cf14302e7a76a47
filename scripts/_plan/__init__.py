"""What will my job take? A model, GPUs and sizes to memory, seconds and dollars: scripts/plan."""
