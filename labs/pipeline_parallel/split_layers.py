"""Exercise 7.19: contiguous stages of which the slowest is as fast as can be."""

import operator
import random
from collections.abc import Callable, Sequence

from labs.checks.generator import new_generator, unless_graded
from labs.checks.numbers import as_list
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures.tables import Table
from labs.pipeline_parallel.run_actions import guess_words
from labs.pipeline_parallel.stages import even_layers

CASES = 300
_HINT = "Return how many parts each rank has, in order: [3, 2, 2] for 7 parts on 3 ranks."


@check("7.19")
def check_split_layers(split_layers: Callable):
    """split_layers(costs, ranks): how many consecutive parts each rank has; at least one each."""
    rng = new_generator()
    for costs, ranks in [*_known(), *(_random_case(number, rng) for number in range(CASES))]:
        counts = _counts(split_layers(list(costs), ranks), costs, ranks)
        slowest, best = _slowest(costs, counts), best_split(costs, ranks)
        # The invariant: no other contiguous split has a faster slowest stage. By cost, not by
        # counts: several splits may be equally good.
        if slowest > best * (1 + 1e-9):
            raise Wrong(f"costs {_shown(costs)} on {ranks} ranks: {counts} makes the slowest stage "
                        f"take {slowest:.4g}; {unless_graded(f'{best:.4g}')} can be reached",
                        _why(costs, counts, ranks), code="not_balanced")
    # Of the cases that are not drawn: a notebook's output is compared with the committed one.
    largest = max(_slowest(costs, _even(len(costs), ranks)) / best_split(costs, ranks)
                  for costs, ranks in _known())
    return (f"the slowest stage is the fastest that there is in {CASES} drawn cases; as many parts "
            f"on each rank would take up to {largest:.1f}x as long in the others")


def best_split(costs: Sequence[float], ranks: int) -> float:
    """The minimum cost of the slowest of so many contiguous stages, by trying all."""
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    best = ends[:]  # of the first k parts on one rank
    for rank in range(2, ranks + 1):
        # best[end]: the slowest of `rank` stages that have the first `end` parts; the last of them
        # begins at `start`, and each stage before has at least one part.
        best = [min((max(best[start], ends[end] - ends[start]) for start in range(rank - 1, end)),
                    default=float("inf")) for end in range(len(ends))]
    return best[-1]


def _known():
    """Embedding, layers and head; ties; as many ranks as parts; one rank."""
    return [((0.1, *(1.0,) * 8, 2.4), 4), ((1.0,) * 7, 3), ((3.0, 1.0, 2.0), 3), ((1.0, 5.0), 1),
            ((0.0, 0.0, 1.0, 0.0), 2), ((9.0, *(1.0,) * 6), 3)]


def _random_case(number, numbers: random.Random) -> tuple[tuple[float, ...], int]:
    """Mostly a model: a cheap embedding, equal layers, an expensive head; else any costs."""
    parts = numbers.randint(2, 18)
    ranks = numbers.randint(1, min(parts, 6))
    if number % 3 == 0:
        costs = [float(numbers.randint(0, 9)) for _ in range(parts)]
        costs[numbers.randrange(parts)] = 9.0  # of zeros alone no split is faster than another
    else:
        layer = numbers.uniform(0.5, 2)
        costs = [layer] * parts
        costs[0], costs[-1] = layer * numbers.uniform(0, 1), layer * numbers.uniform(0.5, 6)
    return tuple(costs), ranks


def _counts(returned, costs, ranks) -> list[int]:
    counts = as_list(returned)
    if counts is None:
        raise Wrong(f"split_layers returned {kind_of(returned)}, not a list", _HINT,
                    code="wrong_type")
    try:
        counts = [operator.index(count) for count in counts]
    except TypeError:
        raise Wrong(f"split_layers returned {returned!r:.80}, not a list of whole numbers",
                    _HINT, code="wrong_type") from None
    case = f"{len(costs)} parts on {ranks} ranks"
    if len(counts) != ranks:
        raise Wrong(f"{case}: split_layers returned {counts}, which is {len(counts)} stages",
                    _HINT, code="wrong_count")
    if min(counts) < 1:
        raise Wrong(f"{case}: in {counts} a rank has no part", "Each rank has at least one part.",
                    code="empty_stage")
    if sum(counts) != len(costs):
        raise Wrong(f"{case}: {counts} are {sum(counts)} parts", "Every part is on one rank.",
                    code="wrong_sum")
    return counts


def _why(costs, counts, ranks) -> str:
    if counts in (_even(len(costs), ranks), _even(len(costs), ranks)[::-1]):
        return ("As many parts on each rank is not as much work: embedding and head do not cost "
                "the same as a layer.")
    return ("Filling each stage up to the mean can leave too much for the last one. Try every "
            "size of the first stage, and split the rest in the best way.")


def _even(parts, ranks) -> list[int]:
    return [parts // ranks + (rank < parts % ranks) for rank in range(ranks)]


def _slowest(costs, counts) -> float:
    start, found = 0, []
    for count in counts:
        found.append(sum(costs[start:start + count]))
        start += count
    return max(found)


def _shown(costs) -> str:
    return "[" + ", ".join(f"{cost:.3g}" for cost in costs) + "]"


@shows("7.19")
def show_split(split_layers: Callable, costs: Sequence[float], ranks: int) -> Table:
    """A table of the stages by numbers of parts and by the student's split."""
    split = list(split_layers(list(costs), ranks))
    return Table(f"{len(costs)} parts on {ranks} ranks",
                 ("split", "parts of each stage", "cost of each stage", "slowest", "idle"),
                 [_row("as many parts each", even_layers(len(costs), ranks), costs),
                  _row("your split", split, costs)], left=2,
                 note="idle: the share of all ranks' time that is spent waiting for the slowest "
                      "stage, the bubble not counted."
                      + guess_words("7.19", "the slowest stage", max(_stages(split, costs))))


def _stages(counts, costs) -> list[float]:
    """What each stage costs."""
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return [sum(costs[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def _row(name, counts, costs) -> tuple:
    stages = _stages(counts, costs)
    slowest = max(stages)
    return (name, ", ".join(map(str, counts)), ", ".join(f"{cost:.3g}" for cost in stages),
            f"{slowest:.3g}", f"{1 - sum(stages) / len(stages) / slowest:.0%}")
