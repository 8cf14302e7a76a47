"""What scripts/on-gpu and scripts/solutions share: processes that end in time, the machine, and the
folder of the results; and the reference runs, which preflight and the builder read too."""
