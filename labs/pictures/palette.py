"""The colours of all pictures: the same thing has the same colour in all notebooks."""

INK = "#1f2933"
MUTED = "#6b7280"
GRID = "#e5e7eb"
PAPER = "#ffffff"
SURFACE = "#f6f7f9"  # of a box that holds other things
BORDER = "#c5ccd3"  # of such a box, and of what is left over
RULE = "#8a929c"  # a table's line, on a light and on a dark page

RANKS = ("#3b6fb6", "#e07b39", "#4a9d6b", "#a05bb0", "#c2a13a", "#3aa6b9", "#c8506f", "#7a6a58")

PHASES = {"forward": "#7fb069", "backward": "#3b6fb6", "communication": "#e8a33d",
          "exposed": "#d1495b", "optimizer": "#8e6fae", "other": BORDER}

MEMORY = {"parameters": "#3b6fb6", "gradients": "#e07b39", "optimizer state": "#8e6fae",
          "activations": "#7fb069", "buffers": "#e8a33d", "other": BORDER}

COLLECTIVES = {"all_reduce": "#e8a33d", "reduce_scatter": "#e07b39", "all_to_all": "#f2b391",
               "all_gather": "#3b6fb6", "broadcast": "#8e6fae", "other": BORDER}

# Whatever a bar may be made of, in the order of legends.
PARTS = {name: colour for kind in (MEMORY, COLLECTIVES, PHASES) for name, colour in kind.items()
         if name != "other"} | {"other": BORDER}

PREDICTED = INK  # the prediction's tick
GUESSED = "#d6249f"  # the student's tick; no rank, no phase and no verdict has it

# Verdicts of checks, and whether a job fits a GPU: readable on white as on black.
PASSED, REJECTED, PENDING = "#2a9347", "#d43c30", "#7d8590"
# What a rank did in a launch; RANK_FAILED is also the limit that a rank's memory ran into.
RANK_RETURNED, RANK_FAILED, RANK_WAITS = "#1a7f37", "#b42318", "#b45309"
COLLECTIVE_DONE = "#dcefe2"
UNKNOWN_ORIGIN = "#9aa3ad"  # of a number that no rank's digits explain

MACHINE = {"core": "#8795a5", "memory": "#b7c0ca", "GPU": "#eef6ea", "link": "#7fb069"}


def rank(number: int) -> str:
    """The colour of a rank; it repeats after eight."""
    return RANKS[number % len(RANKS)]
