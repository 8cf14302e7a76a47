"""Jobs: a script started on ranks. `torchrun` is what the notebook shows; `forked` starts the same
ranks in a tenth of the time, and `probe` notes in each of them what it does. Weak and strong
scaling, and the steps in which time is lost, are measured on launched ranks."""
