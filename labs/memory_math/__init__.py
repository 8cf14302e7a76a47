"""Notebook 01: the memory of a training job by formula, held against what ranks really hold.

The names are looked up on first use, so that a rank does not load what draws.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "check_parameters": ".checks", "check_bytes_per_parameter": ".checks",
    "check_per_rank": ".checks", "check_activations": ".activation_checks",
    "check_step_flops": ".activation_checks", "check_bytes_left": ".fit_checks",
    "check_rank_states": ".fit_checks",
    "measure_checkpointing": ".measuring", "measure_ranks": ".measuring",
    "models": ".show", "show_models": ".show", "show_block": ".show", "show_outside": ".show",
    "show_recipes": ".show", "show_quoted": ".show", "show_figure_1": ".show",
    "show_70b": ".show", "show_savings": ".show", "show_saved": ".show", "show_layers": ".show",
    "show_activations": ".show",
    "show_price": ".show_runs", "show_kept": ".show_runs", "show_left": ".show_runs",
    "show_self_check": ".show_runs", "show_states": ".show_runs",
    "show_leftovers": ".show_runs", "show_peak": ".show_runs", "show_rest": ".show_runs",
    "explore_memory": ".explorer", "show_scaling": ".scaling",
    "preset": "labs.training.presets",
    "gpu": "labs.predictions.hardware", "overhead": "labs.predictions.hardware",
})
