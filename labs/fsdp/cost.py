"""Exercise 4.2: what a wrapping costs in collectives, in gathered bytes and in seconds of forward
in which a rank waits for an all-gather."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from labs.checks.comparison import compare, model_of
from labs.checks.generator import new_generator
from labs.checks.gpu_notes import rounds_of
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Mistake,
    judge_number,
    likeliest_cause,
    number_or_none,
    require_numbers,
)
from labs.checks.verdicts import check, shows
from labs.fsdp import scaffold
from labs.fsdp.comparisons import draw_wrappings, few_tokens
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.training.memory_categories import GB
from labs.training.presets import Preset


@dataclass(frozen=True)
class Machine:
    """A link and a processor. latency: seconds before the first byte of an all-gather; link,
    computing: seconds for each parameter, of its all-gather and of its forward."""

    name: str
    latency: float
    link: float
    computing: float

    def gather(self, parameters: float) -> float:
        """Returns the seconds that an all-gather of so many parameters is in flight."""
        return self.latency + self.link * parameters

    def compute(self, parameters: float) -> float:
        """Returns the seconds of forward of a unit with so many parameters."""
        return self.computing * parameters


# Most is gathered at the first unit, in the middle and at the last one; the root is larger than a
# unit and smaller; there are no units beside it, one, and two.
UNITS = ([5, 40, 10, 90, 80, 70, 60], [500], [10, 300, 50, 200, 250], [100, 900], [60, 400, 700],
         [10, 300, 250, 20, 200, 30], [1000, 700, 700, 700], [800, 20, 30])
# Computing hides nearly all, much, only the bytes, and little of the all-gathers.
MACHINES = (Machine("a fast link", 0.0, 1e-6, 1e-5), Machine("equal speeds", 0.0, 1e-5, 1e-5),
            Machine("a link of long latency", 2e-3, 1e-6, 1e-5),
            Machine("a slow link", 1e-3, 3e-5, 1e-5))
CASES = [(units, machine) for units in UNITS for machine in MACHINES]
NAMES = ("collectives", "gathered_bytes", "exposed_seconds")
_FEW_UNITS = ("cost is called with [500], the root alone, and with [100, 900], the root and one "
              "unit, too.")


@check("4.2", hints={"empty sequence": _FEW_UNITS, "out of range": _FEW_UNITS,
                     "not enough values to unpack": _FEW_UNITS})
def check_cost(cost: Callable[..., tuple[int, int, float]]) -> str:
    """cost(units, gather, compute) -> (collectives of a step, bytes gathered at once, exposed
    seconds of a forward). units: parameters of each unit, the root's first, then in the order of
    forward; fp32. gather(n), compute(n): seconds of an all-gather of n parameters, and of their
    forward."""
    cases = [*CASES, *_random_cases()]
    for place, (units, machine) in enumerate(cases):
        what = f"cost({units}, ...)"
        found = require_numbers(_ask(cost, units, machine), NAMES, what)
        for index, (want, unit, mistakes, hint) in enumerate((
                (collectives(units), NAMES[0], _COLLECTIVES, "One all-gather for the root, two for "
                 "each other unit, one reduce-scatter for all."),
                (gathered_bytes(units), "bytes gathered at once", _GATHERED, _gathered_hint(units)),
                (exposed(units, machine), f"exposed seconds on {machine.name}", _EXPOSED,
                 _EXPOSED_HINT))):
            # One case alone fits several mistakes: the named one explains the answers to all cases
            # best.
            causes = [] if found[index] == want else likeliest_cause(
                mistakes, cases, [_one_number(cost, case, index) for case in cases], place)
            judge_number(found[index], want, causes, what, unit, hint)
    return ("counts the collectives of a step, the bytes gathered at once and the exposed seconds "
            f"of a forward, for {len(UNITS)} lists of units on {len(MACHINES)} machines")


def _random_cases() -> list[tuple[list[int], Machine]]:
    """Others at each call, so that no table has the answers."""
    rng = new_generator()
    return [([rng.randrange(1, 1000) for _ in range(size)],
             Machine("a random link", rng.uniform(0, 2e-3), rng.uniform(1e-6, 2e-5), 1e-5))
            for size in (2, 5, 8)]


def _ask(cost, units, machine):
    return cost(list(units), machine.gather, machine.compute)


def _one_number(cost, case, index) -> int | float | None:
    return number_or_none(lambda: require_numbers(_ask(cost, *case), NAMES, "")[index])


def _gathered_hint(units) -> str:
    if len(units) == 1:
        return "The root alone: its flat buffer, and the parameters that are copied out of it."
    return ("Go through the units in order, and count at the moment at which each is copied out: "
            "the root's parameters, the buffer of the unit before, this unit's buffer and "
            "parameters.")


def collectives(units: list[int]) -> int:
    """Returns the collectives of one step: the root is gathered once, every other unit twice, and
    each unit is reduce-scattered once."""
    # Gathers of the root, gathers of the other units, reduce-scatters.
    return 1 + 2 * (len(units) - 1) + len(units)


def gathered_bytes(units: list[int]) -> int:
    """Returns the most bytes gathered at once, fp32, while a unit of forward is copied out of its
    flat buffer: buffer and parameters of this unit, the buffer of the unit before, and the root's
    parameters. Source: torch 2.13, FSDPParamGroup.wait_for_unshard, whose local variable keeps the
    result of the all-gather before until it returns. Backward holds no more: there a buffer is
    freed as soon as it is copied out, and the unit before it is gone."""
    root = units[0]
    return 4 * (root + max(_arrivals(units), default=root))


def exposed(units: list[int], machine: Machine) -> float:
    """Returns the seconds in which a forward waits for all-gathers: those of the root and of the
    first unit, while nothing computes, and what the unit before does not hide of each other one."""
    return sum(map(machine.gather, units[:2])) + sum(
        max(0.0, machine.gather(b) - machine.compute(a)) for a, b in _neighbours(units))


def _neighbours(units) -> list[tuple[int, int]]:
    """The units besides the root, each with the one after it."""
    return list(zip(units[1:], units[2:], strict=False))


def _arrivals(units, before=1, here=2) -> list[int]:
    """For each unit besides the root: so many times the unit before it and the unit itself."""
    # By default: the flat buffer of the unit before, and this unit's buffer and parameters.
    return [before * a + here * b for a, b in zip(units, units[1:], strict=False)]


def _of_units(code: str, number: Callable[[list[int]], float], sentence: str,
              hint: str = "") -> Mistake:
    """A Mistake that does not depend on the machine."""
    return Mistake(code, lambda case: number(case[0]), sentence, hint)


# Each number is what one particular misunderstanding gives. CASES tell every two of them apart.
_COLLECTIVES = (
    # Resharding after forward costs a second all-gather; the root alone is spared it.
    _of_units("count_one_all_gather", lambda units: 2 * len(units), "you count one all-gather for "
            "each unit, but all units except the root are gathered again for backward"),
    _of_units("root_stays_gathered_after_forward", lambda units: 3 * len(units),
            "the root stays gathered after its forward, since its backward follows at once"),
    _of_units("all_gathers", lambda units: 2 * len(units) - 1,
            "these are the all-gathers; each unit's gradients are reduce-scattered too"),
    _of_units("unit_more_than_one_collective", len,
            "each unit has more than one collective in a step"))
_GATHERED = (
    _of_units("counts_parameters", lambda units: gathered_bytes(units) // 4,
            "that counts parameters; in fp32 each is 4 bytes"),
    _of_units("all_units_together_never_gathered", lambda units: 4 * sum(units),
            "all units together are never gathered at once", "A unit is freed after its forward."),
    _of_units("all_units_together_never_gathered", lambda units: 8 * sum(units),
            "all units together are never gathered at once",
            "Only the root stays gathered; another unit is freed after its forward."),
    _of_units("root_parameters_alone", lambda units: 4 * units[0],
            "that is the root's parameters alone; each unit that arrives is there twice"),
    _of_units("counts_unit_computes_once", lambda units: 4 * (units[0] + max(units[1:] or [0])),
            "that counts the unit that computes once; it is there twice while it is copied out of "
            "its flat buffer, and the buffer of the unit before is there as well"),
    _of_units("counts_two_neighbours_once",
            lambda units: 4 * (units[0] + max(_arrivals(units[1:], 1, 1) or units[1:] or [0])),
            "that counts each of two neighbours once; the second is there twice, in its flat "
            "buffer and copied out of it",
            "A buffer of the unit before, a buffer and parameters of this unit."),
    _of_units("counts_two_neighbours_once",
            lambda units: 4 * (units[0] + max(_arrivals(units, 1, 1) or [0])),
            "that counts each of two neighbours once; the second is there twice, in its flat "
            "buffer and copied out of it",
            "A buffer of the unit before, a buffer and parameters of this unit."),
    _of_units("root_buffer_counted", lambda units: 8 * (units[0] + max(units[1:] or [0])),
            "of the root only the parameters are still there when a unit is copied out",
            "For the first unit the root is the unit before."),
    _of_units("leaves_out_flat_buffer_unit",
            lambda units: 4 * (units[0] + 2 * max(units[1:] or units)), "that leaves out the flat "
            "buffer of the unit before, which is freed only when this unit has been copied out"),
    _of_units("root_parameters_stay_gathered_time",
            lambda units: (4 * max(_arrivals(units) or [2 * units[0]]) if len(units) > 1
                           else 8 * units[0]),
            "the root's parameters stay gathered the whole time", "Add the root's bytes."),
    _of_units("unit_arrives_twice",
            lambda units: 4 * (units[0] + max(_arrivals(units, 2, 1), default=units[0])),
            "the unit that arrives is there twice, and of the one before it only the buffer"),
    _of_units("unit_before_only_flat_buffer",
            lambda units: 4 * (units[0] + max(_arrivals(units, 2, 2), default=units[0])),
            "of the unit before only the flat buffer is there; its parameters were freed after its "
            "forward"),
    _of_units("root_before_first_unit",
            lambda units: 4 * (units[0] + max(
                [*_arrivals(units[1:]), *(2 * u for u in units[1:2])], default=units[0])),
            "for the first unit the root is the unit before: its flat buffer is still there"),
    _of_units("moment_first_unit_arrives",
            lambda units: 4 * (units[0] + (_arrivals(units) or units[:1])[0]),
            "that is the moment at which the first unit arrives; at another one more is there"),
    _of_units("moment_last_unit_arrives",
            lambda units: 4 * (units[0] + (_arrivals(units) or units[:1])[-1]),
            "that is the moment at which the last unit arrives; at another one more is there"),
    _of_units("largest_unit_twice",
            lambda units: (4 * (units[0] + 3 * max(units[1:] or [0])) if len(units) > 1
                           else 8 * units[0]),
            "the largest unit is there twice, but the unit before it may be smaller"),
    _of_units("two_largest_units_may",
            lambda units: 4 * (units[0] + sum(sorted(units)[-2:]) + max(units[1:]))
                if len(units) > 1 else 8 * units[0], "the two largest units may not be neighbours",
            "Only a unit and the one before it in forward meet."),
    _of_units("root_alone_arrives_in_flat",
            lambda units: 4 * units[0] if len(units) == 1 else gathered_bytes(units),
            "the root alone arrives in a flat buffer too, and is copied out of it"))
_EXPOSED_HINT = ("Count gather(root) and gather(first unit) in full. For each further unit count "
                 "max(0, gather(unit) - compute(unit before)).")


def _seconds(code: str, sentence: str, first: Callable | None = None,
             pair: Callable | None = None) -> Mistake:
    """`exposed` with one part counted otherwise. first(units, machine): what is waited for before
    the first unit computes; pair(a, b, machine): for two neighbours."""
    def number(case):
        units, m = case
        begin = first(units, m) if first else sum(map(m.gather, units[:2]))
        return begin + sum(pair(a, b, m) if pair else max(0.0, m.gather(b) - m.compute(a))
                           for a, b in _neighbours(units))
    return Mistake(code, number, sentence)


_EXPOSED = (
    _seconds("all_gathers_in_full", "you count every all-gather in full; after the first unit, "
             "each is in flight while the unit before it computes",
             pair=lambda a, b, m: m.gather(b)),
    _seconds("root_all_gather_missing", "you leave the root's all-gather out; nothing hides it",
             first=lambda units, m: sum(map(m.gather, units[1:2]))),
    _seconds("first_all_gather_missing", "you leave the first unit's all-gather out; nothing "
             "computes while it is in flight", first=lambda units, m: m.gather(units[0])),
    _seconds("first_two_missing", "you leave out the all-gathers of the root and of the first "
             "unit; nothing hides them", first=lambda units, m: 0.0),
    _seconds("later_units_missing", "you leave out the later units: an all-gather may take longer "
             "than the forward of the unit before", pair=lambda a, b, m: 0.0),
    _seconds("hidden_by_root", "you hide the first unit's all-gather behind the root's computing; "
             "the root hides nothing", first=lambda units, m: m.gather(units[0]) + sum(
                 max(0.0, m.gather(b) - m.compute(units[0])) for b in units[1:2])),
    _seconds("hidden_by_own_forward", "you hide an all-gather behind its own unit's forward; "
             "gather(unit) is hidden by compute(unit before)",
             pair=lambda a, b, m: max(0.0, m.gather(b) - m.compute(b))),
    _seconds("hidden_by_next_forward", "you hide an all-gather behind the next unit's forward; "
             "gather(unit) is hidden by compute(unit before)",
             pair=lambda a, b, m: max(0.0, m.gather(a) - m.compute(b))),
    _seconds("below_zero", "a forward that is longer than the next all-gather saves no time: the "
             "exposed part is never below zero", pair=lambda a, b, m: m.gather(b) - m.compute(a)),
    _seconds("gathers_bytes", "you give gather the bytes; it takes the number of parameters",
             first=lambda units, m: sum(m.gather(4 * size) for size in units[:2]),
             pair=lambda a, b, m: max(0.0, m.gather(4 * b) - m.compute(a))),
    _seconds("computes_bytes", "you give compute the bytes; it takes the number of parameters",
             pair=lambda a, b, m: max(0.0, m.gather(b) - m.compute(4 * a))))


# three wrappings, measured


@shows("4.2")
def show_wrappings(wrappings: dict[str, Callable], preset: Preset, cost: Callable) -> Picture:
    """Trains the model under every wrapping (name -> function that selects its units). Draws peak,
    gathered bytes and collectives, with what the student's `cost` predicts and the guess for the
    wrapping "each linear"."""
    size, machine = few_tokens(preset), a100_on("NVLink")
    model = model_of(size)
    calls, nbytes, _ = zip(*(_ask(cost, scaffold.unit_sizes(select, model), machine)
                             for select in wrappings.values()), strict=True)
    guesses = [guessed("4.2") if name == "each linear" else None for name in wrappings]
    compared = compare({name: partial(scaffold.shard_units, select)
                        for name, select in wrappings.items()}, size,
                       rounds=rounds_of(size), quiet=True)
    return draw_wrappings(compared, calls, nbytes, guesses)


# five wrappings of Llama-2-7B on three links, computed

TOKENS = 4096  # of each rank
RANKS = 8
LATENCY = 20e-6  # seconds: of a small collective among the GPUs of a node, in order of magnitude
OVERHEAD = 50e-6  # seconds: FSDP's hooks, the launch and the copies of a collective, likewise
UTILISATION = 0.4  # of the peak, as well-tuned training reaches it
_A100 = hardware.gpu("A100-80")
LINKS = {"NVLink": _A100.nvlink, "PCIe 4": _A100.pcie, "100 GbE": 100e9 / 8}


def llama_wrappings() -> dict[str, list[int]]:
    """Returns name -> units of Llama-2-7B: parameters, the root's first."""
    hidden, inner, layers, vocabulary = 4096, 11008, 32, 32000
    linears = 4 * [hidden * hidden] + 3 * [hidden * inner]
    norms, root = 2 * hidden, 2 * vocabulary * hidden + hidden
    block = sum(linears) + norms
    return {"whole model": [root + layers * block],
            "8 blocks": [root] + 4 * [8 * block], "2 blocks": [root] + 16 * [2 * block],
            "each block": [root] + layers * [block],
            "each linear": [root + layers * norms] + layers * linears}


def a100_on(link: str) -> Machine:
    """Returns an A100 on one of LINKS: fp32 parameters of RANKS ranks, TOKENS tokens a rank, whose
    products are in 16 bits."""
    return Machine(link, LATENCY, 4 * (RANKS - 1) / RANKS / LINKS[link],
                   2 * TOKENS / (UTILISATION * _A100.flops))


@shows("4.2")
def show_exposed(cost: Callable) -> Table:
    """Returns a table of Llama-2-7B on A100s: what each wrapping costs by the student's `cost`, and
    the time that its forward loses on three links: what is exposed, and OVERHEAD for each unit."""
    machines, wrappings = [a100_on(link) for link in LINKS], llama_wrappings()
    costs = {name: [_ask(cost, units, one) for one in machines]
             for name, units in wrappings.items()}
    lost = {name: [seconds + OVERHEAD * len(wrappings[name]) for _, _, seconds in found]
            for name, found in costs.items()}
    least = [min(column) for column in zip(*lost.values(), strict=True)]
    rows = [(name, f"{found[0][1] / GB:.1f}", f"{found[0][0]}",
             *(f"{seconds * 1e3:,.0f}{' ←' * (seconds == best)}"
               for seconds, best in zip(lost[name], least, strict=True)))
            for name, found in costs.items()]
    computes = machines[0].compute(sum(wrappings["whole model"]))
    return Table(f"Llama-2-7B on {RANKS} × A100-80, {TOKENS:,} tokens a rank, gathered in fp32, "
                 "multiplied in 16 bits: computed, not measured",
                 ("", "GB at once", "collectives", *(f"ms lost, {link}" for link in LINKS)), rows,
                 note=f"← loses least. A forward computes {computes * 1e3:,.0f} ms. Assumed: "
                      f"{LATENCY * 1e6:g} µs of latency, and {OVERHEAD * 1e6:g} µs of overhead for "
                      "each all-gather.")
