"""The checks of notebook 01, a file for each exercise: 1.1 parameters, 1.2 bytes_per_parameter,
1.3 per_rank, 1.4 activations, 1.5 step_flops, 1.6 bytes_left, 1.7 rank_states,
1.8 bytes_for_backward, with `forward_cases`."""

STATES = ("parameters", "gradients", "optimizer state")

# For checks of formulas: an answer that looks its input up in a table raises KeyError.
TABLE_HINT = {"KeyError": "A table holds only the models it was made for: compute from the sizes."}
