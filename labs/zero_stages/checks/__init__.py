"""The checks of notebook 03, by exercise.

3.1 cut, 3.2 to 3.4 stages (ZeRO-1, -2 and -3), 3.5 prefetch, 3.6 clip_grad_norm, 3.7 reshard,
3.9 choose, 3.10 from_scratch. `reference` trains a submission next to the reference,
`architectures` does so on models of other structures, `invariants` holds its memory and its traffic
to what its stage allows.
"""
