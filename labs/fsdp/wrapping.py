"""Units: what a wrapping costs in collectives and in gathered bytes, and which one to take."""

from functools import partial

from torch import nn

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Wrong, check, kind_of, shows
from labs.fsdp.measuring import measure, model
from labs.fsdp.trained import mesh
from labs.pictures import fsdp as pictures
from labs.pictures import palette


def linears(model) -> list:
    """Every linear layer whose weight no other module shares (GPT-2's are called Conv1D)."""
    owners = [id(p) for module in model.modules() for p in module._parameters.values()
              if p is not None]
    return [module for module in model.modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            if owners.count(id(module.weight)) == 1]


def by_units(select, model, optimizer_class, **settings):
    """The strategy in which each module of `select(model)` is a unit, and the rest the root's."""
    from torch.distributed.fsdp import fully_shard

    for module in select(model):
        fully_shard(module, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model, optimizer_class(model.parameters(), **settings)


def sizes(select, made) -> list:
    """Parameters of each unit, the root's first."""
    units = [sum(p.numel() for p in module.parameters()) for module in select(made)]
    return [sum(p.numel() for p in made.parameters()) - sum(units), *units]


CASES = ([1000, 700, 700, 700], [500], [10, 300, 50, 200, 250], [100, 900])


ALONE = "cost([500]) is asked too, a root alone; and cost([100, 900]), where none has a neighbour."


@check("4.2", hints={"empty sequence": ALONE, "out of range": ALONE})
def check_cost(cost):
    """cost(units) -> (collectives of a step, bytes gathered at once). units: parameters of each
    unit, the root's first, then in the order of forward; fp32."""
    for units in CASES:
        found = cost(list(units))
        if not isinstance(found, tuple) or len(found) != 2:
            raise Wrong(f"cost({units}) returned {kind_of(found)}, not two numbers",
                        "return collectives, gathered_bytes")
        _judge_calls(units, found[0])
        _judge_gathered(units, found[1])
    return "counts the collectives of a step and the bytes gathered at once, for any units"


def calls(units) -> int:
    """The root is gathered once, every other unit twice; each is reduce-scattered once."""
    return 1 + 2 * (len(units) - 1) + len(units)


def gathered(units) -> int:
    """Bytes, fp32: the root, and the two neighbours that are largest together."""
    rest = units[1:]
    return 4 * (units[0] + max([a + b for a, b in zip(rest, rest[1:], strict=False)] or rest
                               or [0]))


def _judge_calls(units, found):
    want, n = calls(units), len(units)
    if found == want:
        return
    if found == 2 * n:
        raise Wrong(f"cost({units}): {found} collectives; you count one all-gather for each unit, "
                    f"but all units except the root are gathered again for backward: {want}")
    if found == 3 * n:
        raise Wrong(f"cost({units}): {found} collectives; the root stays gathered after its "
                    f"forward, since its backward follows at once: {want}")
    raise Wrong(f"cost({units}): {found} collectives; {n} units make {want}",
                "One all-gather for the root, two for each other unit, one reduce-scatter for all.")


def _judge_gathered(units, found):
    want, rest = gathered(units), units[1:]
    if found == want:
        return
    largest = 4 * (units[0] + max(rest or [0]))
    two = 4 * (units[0] + sum(sorted(rest)[-2:]))
    reasons = {
        want // 4: ("that counts parameters; in fp32 each is 4 bytes", ""),
        4 * sum(units): ("all units together are never gathered at once",
                         "A unit is freed after its forward."),
        4 * max(units): ("that is one unit; the root is gathered all the while",
                         "The root's parameters stay from the first forward to the last backward."),
        largest: ("while a unit computes, the next one is already being gathered",
                  "Count two units that follow one another."),
        want - 4 * units[0]: ("the root is gathered all the while", "Add the root's."),
        two: ("the two largest units may not be neighbours",
              "Only the unit that computes and the next one are gathered.")}
    alone = "With one unit beside the root there is no neighbour: both are gathered."
    why, hint = reasons.get(found, ("the root and two neighbours are gathered at once",
                                    alone if len(rest) == 1 else ""))
    raise Wrong(f"cost({units}): {found:,} bytes gathered at once, not {want:,}: {why}", hint)


WRAPPINGS = {"whole model": [400_000], "pairs of blocks": [100_000, 100_000, 100_000, 100_000],
             "one large unit": [50_000, 290_000, 20_000, 20_000, 20_000],
             "each block": [100_000] + 6 * [50_000],
             "each linear": [105_000] + 6 * [12_500, 12_500, 12_500, 12_500]}


@check("4.3", hints={"empty sequence": "Where nothing fits, the answer is None."})
def check_choose(choose):
    """choose(wrappings, free) -> the name of the wrapping to take, or None. wrappings: name ->
    units, as in `cost`; free: bytes that a rank has for gathered parameters."""
    for free in (1_600_000, 1_599_999, 1_440_000, 1_200_000, 800_000, 799_999, 520_000, 519_999):
        for wrappings in (WRAPPINGS, dict(reversed(WRAPPINGS.items()))):
            found = choose({name: list(units) for name, units in wrappings.items()}, free)
            _judge_choice(found, free)
    return "takes the fewest collectives that fit in the free memory, and says when none does"


def _judge_choice(found, free):
    fits = {name: units for name, units in WRAPPINGS.items() if gathered(units) <= free}
    best = min(fits, key=lambda name: calls(fits[name]), default=None)
    if found == best:
        return
    if found is not None and found not in WRAPPINGS:
        raise Wrong(f"choose returned {found!r}, not the name of a wrapping", "Return its name.")
    if best is None:
        raise Wrong(f"with {free:,} bytes free nothing fits, and choose returned {found!r}",
                    "Return None where no wrapping fits.")
    if found is None:
        need = gathered(WRAPPINGS[best])
        raise Wrong(f"with {free:,} bytes free {best!r} fits, since it gathers {need:,} at once, "
                    "and choose returned None",
                    "What needs exactly the free bytes fits." * (need == free))
    if found not in fits:
        raise Wrong(f"with {free:,} bytes free {found!r} does not fit: it gathers "
                    f"{gathered(WRAPPINGS[found]):,} at once")
    raise Wrong(f"with {free:,} bytes free {found!r} fits, but {best!r} fits too and takes "
                f"{calls(WRAPPINGS[best])} collectives instead of {calls(WRAPPINGS[found])}",
                "Every collective has a fixed price: among those that fit, take the fewest.")


@shows("4.2")
def sweep(wrappings: dict, preset):
    """wrappings: name -> function that selects a model's units. Trains each."""
    return measure({name: partial(by_units, select) for name, select in wrappings.items()}, preset)


@shows("4.2")
def show_sweep(measured, wrappings: dict, cost):
    """Peak, collectives and time of each wrapping, with what the student's `cost` predicts."""
    made = model(measured.size)
    predicted = [cost(sizes(select, made))[0] for select in wrappings.values()]
    guesses = [guessed("collectives per step, each linear") if name == "each linear" else None
               for name in wrappings]
    return chart(measured, predicted, guesses)


def chart(measured, predicted=(), guesses=(), note=""):
    """The three panels of a sweep."""
    found = list(measured.results.values())
    panels = [
        pictures.Panel("peak of a step", "MB", [r.report.step_peak for r in found], 1e6),
        pictures.Panel("collectives", "per step", [len(r.calls) for r in found],
                       predicted=predicted, guessed=guesses,
                       colour=palette.PHASES["communication"]),
        pictures.Panel("time", "ms per step", [r.seconds for r in found], 1e-3)]
    return pictures.side_by_side(list(measured.results), panels, note)


