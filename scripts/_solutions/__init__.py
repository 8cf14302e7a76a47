"""Every solution, unattended, on whatever this machine has, with a report: scripts/solutions."""
