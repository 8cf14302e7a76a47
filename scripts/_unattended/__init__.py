"""What scripts/on-gpu and scripts/solutions share: processes that end in time, the machine, and the
folder of the results."""
