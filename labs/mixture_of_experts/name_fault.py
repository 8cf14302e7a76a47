"""Exercise 9.5: which published fault a run has, by its gradients beside those of one process."""

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from labs.checks.generator import new_generator, unless_graded
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.mixture_of_experts.planted_faults import FAULTS, Digest, FaultRun, Model, recorded
from labs.mixture_of_experts.reference_parallel import KINDS, Layout
from labs.pictures.tables import Table
from labs.words import listed
from labs.workers import devices, variant

ROUNDING = 1e-3  # what a healthy ratio or cosine is off by, at most
FAR = 0.01  # what is off by more is marked in the table
SHOWN = Layout(4, 2)
LAYOUTS = (SHOWN, Layout(4, 4), Layout(2, 2))  # of the runs that the check records
_MOST_RANKS = 64
_HINTS = {
    None: "A healthy run's ratios and cosines are 1 up to rounding: compare with a tolerance, and "
          "return None.",
    "experts_doubled": "The experts' gradients are EP times too large, whatever EP is, and after "
                       "one micro-batch already.",
    "summed_each_time": "After one micro-batch all is right. Look at `three`, too.",
    "router_partial": "The router's gradient is that of one rank's tokens. It may be as long as "
                      "the right one, and then only the cosine shows it.",
    "weights_detached": "The router's gradient is zero. A part of all others came through the "
                        "router, so they are off a little, too: look at the router first.",
    "shared_twice": "The shared expert's gradient is 1/N of the right one, whatever N is."}


@dataclass(frozen=True)
class Case:
    """What is described, and the right name."""

    what: str
    fault: str | None
    one: Digest
    three: Digest


@check("9.5")
def check_name_fault(name_fault: Callable):
    """name_fault(one, three): the name of the fault, or None; one, three: kind -> (norm divided by
    that of one process, cosine), after one and after three micro-batches."""
    require_signature(name_fault, ("one", "three"))
    _asked(name_fault, _healthy())  # an exercise not filled in is known before ranks are launched
    cases = [*_recorded_cases(), *drawn()]
    named = [_asked(name_fault, case) for case in cases]
    for case, got in zip(cases, named, strict=True):
        if got != case.fault:
            raise _wrong(case, got, cases, named)
    return (f"{len(cases)} runs, recorded on 2 and 4 ranks and random: each fault named, and none "
            "where there is none")


def _asked(name_fault, case) -> str | None:
    one, three = copy.deepcopy((case.one, case.three))
    kept = UnchangedInputs("name_fault", one=one, three=three)
    got = name_fault(one, three)
    kept.judge()
    if got is not None and not isinstance(got, str):
        raise Wrong(f"{case.what}: name_fault returned {kind_of(got)}, not a name or None",
                    f"One of {listed(FAULTS)}; or None.", code="wrong_type")
    if got is not None and got not in FAULTS:
        raise Wrong(f"{case.what}: name_fault returned {got!r}", f"One of {listed(FAULTS)}; or "
                    "None where there is no fault.", code="unknown_name")
    return got


def _wrong(case, got, cases, named) -> Wrong:
    said = f"{case.what}: you say {got}, it is {unless_graded(case.fault)}"
    # A rule that leads to every one of the answers names the mistake.
    rule = next((rule for rule in RULES if all(
        rule.name(each.one, each.three) == answer
        for each, answer in zip(cases, named, strict=True))), None)
    if rule:
        return Wrong(f"{said}: {rule.sentence}", _HINTS[case.fault], code=rule.code)
    code = ("healthy_named" if case.fault is None else "fault_missed" if got is None else
            "wrong_fault")
    return Wrong(said, _HINTS[case.fault], code=code)


# cases


def _recorded_cases() -> list[Case]:
    return [Case(f"a run on {run.layout.ranks} ranks, EP {run.layout.expert}", run.fault, run.one,
                 run.three) for run in recorded(LAYOUTS, _drawn_model(), devices.device().type)]


@functools.cache
def _drawn_model() -> Model:
    """Another model than that of the table, the same in a process."""
    rng = new_generator()
    return Model(seed=rng.randrange(1, 10_000), hidden=rng.choice((12, 16, 20)),
                 experts=rng.choice((4, 8)))


def _healthy(rng=None) -> Case:
    rng = rng or new_generator()
    return Case("a healthy run of another model", None, _off(rng), _off(rng))


def _off(rng, **kinds: tuple[float, float]) -> Digest:
    """A digest that is right up to rounding, but for these kinds."""
    return {kind: (ratio * (1 + rng.uniform(-0.9, 0.9) * ROUNDING),
                   cosine * (1 - rng.uniform(0, 0.9) * ROUNDING))
            for kind in KINDS for ratio, cosine in [kinds.get(kind, (1.0, 1.0))]}


def drawn() -> list[Case]:
    """Digests of other models on other numbers of ranks. What was measured on 2 and 4 ranks bounds
    them: tests/mixture_of_experts/test_name_fault.py."""
    rng = new_generator()
    found = [_healthy(rng) for _ in range(3)]

    def add(fault, **both):
        """one, three: what is off in each."""
        found.append(Case("a run of another model", fault, _off(rng, **both["one"]),
                          _off(rng, **both["three"])))

    # Of summed_each_time: 7/3 where the micro-batches' gradients are equal, √7 where they have
    # nothing in common.
    for grown in ((7 / 3, 1.0), (rng.uniform(2.34, 2.64), rng.uniform(0.9, 0.97))):
        for experts in (rng.choice((3, 5, 6)), rng.randrange(8, _MOST_RANKS)):
            experts = {"experts": (float(experts), 1.0)}
            add("experts_doubled", one=experts, three=experts)
        for ranks in (3, rng.randrange(5, _MOST_RANKS)):
            shared = {"shared": (1 / ranks, 1.0)}
            add("shared_twice", one=shared, three=shared)
        add("summed_each_time", one={}, three={"experts": grown})
        # of one rank's tokens: longer than the mean, or as long
        for ratio in (rng.uniform(1.2, 3), 1.0):
            add("router_partial", one={"router": (ratio, rng.uniform(0.3, 0.94))},
                three={"router": (ratio, rng.uniform(0.3, 0.94))})
        # A part of all other gradients is missing.
        add("weights_detached", **{part: {
            "router": (0.0, 0.0), **{kind: (rng.choice((0.97, 1.03)), rng.uniform(0.98, 0.985))
                                     for kind in ("experts", "shared", "rest")}}
            for part in ("one", "three")})
    rng.shuffle(found)
    for rule in RULES:
        assert any(rule.name(case.one, case.three) != case.fault for case in found), rule.sentence
    return found


# rules that some students follow


@dataclass(frozen=True)
class Rule:
    """A wrong way to name a fault. name(one, three): the name that it leads to."""

    code: str
    name: Callable[[Digest, Digest], str | None]
    sentence: str


def _is_right(ratio, cosine) -> bool:
    return abs(ratio - 1) < FAR and cosine > 1 - FAR


def _named(one, three, is_right=_is_right, is_doubled=None, router_first=True) -> str | None:
    """The right name; the arguments change it."""
    is_doubled = is_doubled or (lambda ratio, cosine: not is_right(ratio, cosine))
    tests = {"weights_detached": one["router"][0] < FAR,
             "router_partial": not is_right(*one["router"]),
             "experts_doubled": is_doubled(*one["experts"]),
             "shared_twice": not is_right(*one["shared"]),
             "summed_each_time": not is_right(*three["experts"])}
    order = list(tests) if router_first else ["experts_doubled", "shared_twice", *tests]
    return next((name for name in order if tests[name]), None)


RULES = (
    Rule("never_named", lambda one, three: None, "so you say of every run"),
    *(Rule("always_the_same", lambda one, three, name=name: name, "so you say of every run")
      for name in FAULTS),
    Rule("three_ignored", lambda one, three: _named(one, one), "your answers follow from `one` "
         "alone"),
    Rule("one_ignored", lambda one, three: _named(three, three), "your answers follow from `three` "
         "alone"),
    Rule("cosine_ignored", functools.partial(
        _named, is_right=lambda ratio, cosine: abs(ratio - 1) < FAR),
         "your answers follow from the norms alone"),
    Rule("norm_ignored", functools.partial(
        _named, is_right=lambda ratio, cosine: cosine > 1 - FAR),
         "your answers follow from the cosines, which a factor does not change"),
    Rule("rounding_ignored", functools.partial(
        _named, is_right=lambda ratio, cosine: ratio == 1 == cosine),
         "what is off by rounding alone counts as a fault"),
    Rule("only_factor_2", functools.partial(
        _named, is_doubled=lambda ratio, cosine: abs(ratio - 2) < FAR),
         "you find a factor of 2 only, which is EP in some runs"),
    Rule("router_last", functools.partial(_named, router_first=False),
         "where the router has no gradient, the others are off a little, too"))


# the table


@shows("9.5")
def show_gradients() -> Table:
    """Returns a table of the five faults, recorded on 4 ranks with EP 2, in an order that does not
    tell them: norm and cosine of each kind, after one and after three micro-batches."""
    rows = []
    for letter, run in shown_runs().items():
        rows += [(letter, "one", *map(_cell, _in_order(run.one))),
                 ("", "three", *map(_cell, _in_order(run.three)))]
    return Table("rank 0's gradients beside those of one process: norm ratio, cosine",
                 ("run", "micro-batches", *KINDS), rows, left=1,
                 note=f"✗: the ratio or the cosine is off by more than {FAR:g}. {SHOWN.ranks} "
                 f"ranks, EP {SHOWN.expert}.")


def shown_runs() -> dict[str, FaultRun]:
    """Letter -> the run with one of the faults."""
    runs = [run for run in recorded((SHOWN,), Model(), devices.device().type) if run.fault]
    # Other letters in each variant; with 9 none is in its place of the notebook's table.
    random.Random(variant.seed_of(9)).shuffle(runs)
    return dict(zip("ABCDE", runs, strict=True))


def _in_order(digest) -> list[tuple[float, float]]:
    return [digest[kind] for kind in KINDS]


def _cell(pair) -> str:
    ratio, cosine = pair
    # A cosine of 0.9967 must not look like that of a healthy run, so three digits.
    return f"{'' if _is_right(ratio, cosine) else '✗ '}{ratio:.3f}, {cosine:.3f}"
