"""Everything that only a GPU can show, in one unattended command: scripts/on-gpu."""
