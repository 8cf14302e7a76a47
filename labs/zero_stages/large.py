"""Tables of notebook 03 for models and machines that nobody has at hand: by formula alone."""

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures.tables import Table
from labs.predictions.memory_recipes import model_states, recipe_of
from labs.training.memory_categories import GB
from labs.zero_stages.choosing import CARDS, MODELS

LARGE_RECIPE = "bf16, fp32 moments"  # 12 bytes per parameter
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
RANKS = (1, 4, 8, 16, 64, 512)


def show_large(parameters: float, ranks: int = 8) -> Table:
    """What each stage leaves on a rank at 12 bytes per parameter, and the student's guess."""
    recipe = recipe_of(LARGE_RECIPE)
    divided = (0, recipe.optimizer_state, recipe.optimizer_state + recipe.gradients, recipe.total)
    rows = [(name, _times(recipe.total - part), f"{_times(part)}/{ranks}" if part else "",
             f"{model_states(parameters, recipe, ranks=ranks, stage=stage).total / GB:g}")
            for stage, (name, part) in enumerate(zip(STAGES, divided, strict=True))]
    guess = guessed(f"GB per rank, {parameters / 1e9:g}B under ZeRO-2 on {ranks} ranks")
    return Table(f"{parameters / 1e9:g}B parameters on {ranks} ranks, {recipe.name}: GB per rank",
                 ("", "whole", "divided", "GB"), rows,
                 note="" if guess is None else f"your guess for ZeRO-2: {guess:g}")


def _times(each) -> str:
    return f"{each:g}Ψ" if each else "0"


@shows("3.9")
def show_choices(choose, card: str = "A100-80", activations: float = 10 * GB) -> Table:
    """What the student's function chooses on `card`, for some models and numbers of ranks."""
    if card not in CARDS:
        raise ValueError(f"no card {card!r}: choose {', '.join(CARDS)}")
    rows = [(model, *(_named(choose(parameters, ranks, CARDS[card], activations))
                      for ranks in RANKS)) for model, parameters in MODELS.items()]
    return Table(f"on {card}s, with {activations / GB:g} GB of activations",
                 ("model", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS)), rows,
                 note="-: no stage fits")


def _named(stage) -> str:
    return "-" if stage is None else STAGES[stage]
