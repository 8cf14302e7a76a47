"""Exercise 3.8: which ZeRO stage a strategy is, by the bytes that a rank stores after backward."""

from collections.abc import Callable

from labs.checks.comparison import Comparison
from labs.checks.generator import new_generator, unless_graded
from labs.checks.numbers import require_number
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures.tables import Table
from labs.words import listed

PARTS = {"optimizer state": "optimizer_state", "gradients": "gradients",
         "parameters": "parameters"}  # in the order in which the stages shard them -> of Memory
_SIZES = ((8, 4, 4), (12, 2, 2), (8, 2, 2))  # bytes per parameter of these parts
_MB = 1e6


@check("3.8")
def check_stage_by_bytes(stage_by_bytes: Callable):
    """stage_by_bytes(stored, replicated): 0 for DDP, 1, 2 or 3 for a ZeRO stage."""
    rng = new_generator()
    for ranks in (4, 2, 3, 8):
        for stage in (1, 0, 3, 2):
            parameters, sizes = rng.randrange(10**6, 10**9), rng.choice(_SIZES)
            replicated = {part: size * parameters for part, size in zip(PARTS, sizes, strict=True)}
            # Padding and alignment add a few percent to a shard, and to a full tensor.
            stored = {part: round(nbytes / (ranks if number < stage else 1)
                                  * rng.uniform(1.001, 1.08))
                      for number, (part, nbytes) in enumerate(replicated.items())}
            _judge(stage_by_bytes(dict(stored), dict(replicated)), stage, stored, replicated, ranks)
    return "right for 16 cases: all stages, on 2 to 8 ranks, with padding"


def _judge(got, stage, stored, replicated, ranks):
    found = require_number(got, "stage_by_bytes", "Return 0, 1, 2 or 3.")
    if found == stage:
        return
    shares = listed([f"{stored[part] / replicated[part]:.0%} of the {part}" for part in PARTS])
    said = (f"{ranks} ranks: a rank stores {shares} of DDP, and you say stage {found:g}; it is "
            f"stage {unless_graded(stage)}")
    # The invariant: ZeRO shards optimizer state, then gradients, then parameters; so the stage is
    # how many of these are shards.
    if found not in range(4):
        raise Wrong(f"{said}", "The stages are 0 (DDP), 1, 2 and 3.", code="unknown_stage")
    if found == 3 and all(stored[part] != replicated[part] for part in PARTS):
        raise Wrong(f"{said}: some of these parts are not sharded",
                    "Padding makes a part a few percent larger. A shard of two ranks has about "
                    "half of the bytes.", code="padding_is_no_shard")
    if found == 3 - stage:
        raise Wrong(f"{said}: that is the number of replicated parts",
                    "Count those that are sharded.", code="counts_replicated")
    raise Wrong(said, "Which of the three parts are much smaller than DDP's?", code="wrong_stage")


@shows("3.8")
def show_stages_by_bytes(stage_by_bytes: Callable, comparison: Comparison) -> Table:
    """What a rank stores after backward under each strategy, and the stage that the student's
    function finds in it."""
    held = {name: _parts(result.report.phases["backward"])
            for name, result in comparison.results.items()}
    rows = [(name, *(f"{stored[part] / _MB:.1f}" for part in PARTS),
             f"{require_number(stage_by_bytes(dict(stored), dict(held['DDP'])), name):g}")
            for name, stored in held.items()]
    return Table("MB of one rank after backward", ("", *PARTS, "stage by your function"), rows)


def _parts(memory) -> dict[str, int]:
    return {part: getattr(memory, field) for part, field in PARTS.items()}
