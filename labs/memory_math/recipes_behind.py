"""Exercise 1.9: the recipes that a quoted figure may assume."""

import random
from collections.abc import Collection

from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, kind_of
from labs.memory_math.bytes_per_parameter import NAMED, Types, bytes_of, random_types
from labs.memory_math.scaffold import TABLE_HINT
from labs.words import listed

# (GB, billions of parameters). 120 GB lie between two recipes of 7B; "54 GB" is 6.74 x 8, rounded.
FIGURES = [(84, 7), (112, 7), (156, 13), (120, 7), (126, 7), (54, 6.74), (560, 70)]


@check("1.9", hints=TABLE_HINT)
def check_recipes_behind(recipes_behind):
    """The names of all recipes that lead to a figure in GB."""
    require_signature(recipes_behind, ("gigabytes", "billions", "recipes"))
    for gigabytes, billions in FIGURES:
        _judge_names(recipes_behind, gigabytes, billions, NAMED)
    # Other recipes: reject an answer that knows the notebook's own by heart.
    for gigabytes, billions, recipes in _random_cases():
        _judge_names(recipes_behind, gigabytes, billions, recipes)
    return "all recipes of seven figures and of two random ones; 112 GB for 7B may be either of two"


def _random_cases() -> list[tuple[int, int, dict[str, Types]]]:
    """(GB, billions of parameters, recipes by name): a figure of each of two recipes."""
    recipes = dict(zip(("first", "second"), random_types(), strict=True))
    billions = random.randint(3, 90)
    return [(billions * sum(bytes_of(*types)), billions, recipes) for types in recipes.values()]


def _judge_names(recipes_behind, gigabytes, billions, recipes):
    what = f"{gigabytes} GB for {billions}B"
    found = _names(recipes_behind(gigabytes, billions, recipes), what, recipes)
    totals = {name: billions * sum(bytes_of(*types)) for name, types in recipes.items()}
    # In GB: billions of parameters times bytes of each.
    right = {name for name, total in totals.items() if round(total) == gigabytes}
    # All recipes and no other: catches the first match alone, exact equality with a rounded
    # figure, and a tolerance that takes the neighbour.
    for name in sorted(right - found):
        raise Wrong(f"{what}: {name!r} is missing, which makes {_gb(totals[name])} GB",
                    "Several recipes may lead to one figure, and figures are rounded to whole GB.",
                    code="missing_entry")
    for name in sorted(found - right):
        raise Wrong(f"{what}: {name!r} makes {_gb(totals[name])} GB",
                    "Only recipes that lead to this figure, rounded to whole GB.",
                    code="extra_entry")


def _names(returned, what, recipes) -> set[str]:
    if isinstance(returned, str):
        raise Wrong(f"{what}: it returned one name, {returned!r}, not a list of names",
                    "Several recipes may lead to one figure, or none.", code="wrong_type")
    try:
        found = list(returned)
    except TypeError:
        raise Wrong(f"{what}: it returned {kind_of(returned)}, not a list of names",
                    "Where no recipe fits, return an empty list.", code="wrong_type") from None
    return _known(found, what, recipes)


def _known(found: Collection, what, recipes) -> set[str]:
    for name in found:
        if not isinstance(name, str) or name not in recipes:
            raise Wrong(f"{what}: {name!r} is no recipe's name",
                        f"The names are {listed(list(map(repr, recipes)))}.", code="unknown_name")
    return set(found)


def _gb(value) -> str:
    return f"{value:,.6g}"
