"""Exercise 1.3: bytes of one rank under ZeRO."""

import math

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Cause,
    judge_number,
    require_numbers,
    require_signature,
)
from labs.checks.verdicts import check, print_in_script, shows
from labs.memory_math.bytes_per_parameter import states_of
from labs.memory_math.scaffold import STATES, TABLE_HINT
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.communication import traffic
from labs.predictions.memory.recipes import Recipe, model_states
from labs.training.memory_categories import GB


def states_per_rank(count: float, recipe: tuple, stage: int, ranks: int) -> list[float]:
    """Bytes of parameters, gradients and optimizer state on one rank. recipe: bytes per parameter
    of each."""
    held = model_states(count, Recipe("", *recipe), ranks=ranks, stage=stage).by_name()
    return [held[name] for name in STATES]


@check("1.3", hints=TABLE_HINT)
def check_per_rank(per_rank):
    """Three numbers for every stage: the paper's figure 1, 70B on 8 ranks, and random sizes."""
    require_signature(per_rank, ("count", "recipe", "stage", "ranks"))
    for name, count, recipe, ranks in _jobs():
        for stage in (0, 1, 2, 3):
            what = f"{name}, stage {stage}"
            returned = require_numbers(per_rank(count, recipe, stage, ranks), STATES, what)
            real = states_per_rank(count, recipe, stage, ranks)
            totals = f"{_gb(sum(returned))} GB in all, where a rank holds {_gb(sum(real))}"
            for state, got, want, size in zip(STATES, returned, real, recipe, strict=True):
                causes = _causes(want, count * size, ranks, f"missing: {totals}")
                judge_number(got / GB, want / GB, causes, f"{what}: {state}", "GB per rank",
                             "count times bytes; divided by N, or not.")
    return "stages 0 to 3 for the paper's figure 1, for 70B on 8 ranks and for random sizes"


def _jobs() -> list[tuple]:
    """(name, parameters, recipe, ranks)."""
    rng = new_generator()
    recipe, ranks = tuple(rng.sample(range(1, 20), 3)), rng.randint(20, 99)
    count = ranks * rng.randint(10**4, 10**7) + 1  # not divisible, which rejects //
    return [("70B on 8 ranks", 70e9, (2, 2, 8), 8), ("7.5B on 64 ranks", 7.5e9, (2, 2, 12), 64),
            ("a random job", count, recipe, ranks)]


def _causes(want, whole, ranks, missing) -> list[Cause]:
    """In GB. whole: bytes on all ranks together."""
    rule = "Stage 1 shards the optimizer state alone, 2 the gradients too, 3 the parameters too."
    less, more = math.floor(want) / GB, math.ceil(want) / GB
    rounded = "off by less than a byte", "Divide with /: // drops the rest."
    return [Cause("nothing_counted", 0, missing,
                  "A rank keeps its shard: 1/N of the tensor, not nothing."),
            Cause("rounded", less, *rounded), Cause("rounded", more, *rounded),
            Cause("not_divided", whole / GB, "not sharded", rule),
            Cause("divided_though_stage_keeps", whole / ranks / GB,
                  "sharded, though this stage replicates it", rule)]


def _gb(nbytes) -> str:
    return f"{nbytes / GB:,.6g}"


STAGES = ("plain data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")


FIGURE_1 = (120, 31.4, 16.6, 1.9)  # GB, as ZeRO (arXiv 1910.02054) prints them, by stage


@shows("1.3")
def show_figure_1(per_rank) -> Picture:
    """Figure 1 of the ZeRO paper from the student's function."""
    return _stages(per_rank, 7.5e9, (2, 2, 12), 64, "of one rank: 7.5B, 64 ranks, K = 12",
                   note="Printed in the paper's figure: "
                        + ", ".join(f"{gigabytes:g} GB" for gigabytes in FIGURE_1))


@shows("1.3")
def show_70b(per_rank) -> Picture:
    """70B on 8 ranks, with the capacities of GPUs and the student's guess."""
    return _stages(per_rank, 70e9, (2, 2, 8), 8, "of one rank: 70B, 8 ranks, 12 bytes each",
                   guessed("1.3"), ("A100-80", "H200", "B200"))


def _stages(per_rank, count, recipe, ranks, title, guess=None, gpus=(), note="") -> Picture:
    rows = [MemoryRow(name, predicted=states_of(per_rank(count, recipe, stage, ranks), name),
                      guessed=guess and guess * GB if stage == 2 else None)
            for stage, name in enumerate(STAGES)]
    return memory_bars(rows, title, [(hardware.gpu(name).usable, name) for name in gpus],
                       unit="GB", note=note, lesson=(
                           f"{rows[-1].name}: 1/{rows[0].bar.total / rows[-1].bar.total:.3g} of "
                           f"the memory of {rows[0].name}"))


@shows("1.3")
def show_savings(per_rank) -> Table:
    """A table of how many times fewer bytes a rank holds, for more and more ranks."""
    def saving(stage, ranks):
        whole, share = (sum(per_rank(1e9, (2, 2, 12), which, ranks)) for which in (0, stage))
        return f"{whole / share:,.2f}".removesuffix(".00")

    rows = [(f"{ranks:,}", *(saving(stage, ranks) for stage in (1, 2, 3)))
            for ranks in (2, 8, 64, 1024, 10**6)]
    return Table("times less than plain data parallelism, 16 bytes per parameter with K = 12",
                 ("ranks", *STAGES[1:]), rows)


def show_traffic() -> Table:
    """A table of what a step communicates in forward, backward and step, by stage, in Ψ."""
    rows = []
    for stage, name in enumerate(STAGES):
        phases = traffic.passes_by_phase(stage).values()
        rows.append((name, *(" + ".join(map(_volume, kinds)) or "nothing" for kinds in phases)))
    return print_in_script(Table(
        "what goes through a step's collectives, in elements", ("", "forward", "backward", "step"),
        rows, left=3, note="An all-reduce sends its Ψ elements twice. Each of N ranks sends "
        "(N-1)/N of all this; a bf16 element has 2 bytes."))


def _volume(kind) -> str:
    passes = traffic.passes(kind)
    return f"{kind.replace('_', '-')} {passes if passes > 1 else ''}Ψ"
