"""Scripts that a student writes, started on ranks. `commands` runs what the notebook shows, such as
`torchrun`; `forked` starts the same ranks in a tenth of the time, and `probe` notes in each of them
what it does; `files` are the scripts themselves and what they write."""
