"""Exercise 6.11: what a data-parallel job really was, by what its ranks sent and held."""

from collections.abc import Callable
from itertools import chain

from labs.exercises.inputs import UnchangedInputs
from labs.exercises.numbers import Cause, judge_number, require_several
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.meters.evidence import PARTS, RankEvidence
from labs.scaling.checks import recorded_jobs, synthetic_jobs
from labs.scaling.runs.jobs import KINDS
from labs.words import counted

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
NUMBERS = (*PARTS, "reduced")
_NAMES = {part: part.replace("_", " ") for part in PARTS}
_HINT = "Add up what all ranks hold: one copy where it is sharded, N copies where it is not."


@check("6.11")
def check_what_ran(what_ran: Callable):
    """what_ran(ranks): (a name of KINDS, {part: copies, "reduced": ...}) of any job."""
    count = 0
    for what, want, ranks in chain(recorded_jobs.jobs(), synthetic_jobs.jobs()):
        kept = UnchangedInputs("what_ran", calls=[rank.calls for rank in ranks],
                               held=[rank.held for rank in ranks],
                               whole=[rank.whole for rank in ranks])
        name, numbers = require_several(what_ran(ranks), ("the name", "the numbers"),
                                        f"{what}: it returned")
        kept.judge()
        _judge_numbers(numbers, ranks, what)
        _judge_name(name, want, ranks, what)
        count += 1
    return f"{count} jobs recognised, of real ranks and drawn at random, on 1 to 16 ranks"


def evidence_of(ranks: list[RankEvidence]) -> dict[str, float]:
    """Part -> copies that all ranks hold together; "reduced" -> bytes that a rank's reducing
    collectives have, in multiples of its gradients'."""
    whole = ranks[0].whole
    copies = {part: sum(rank.held[part] for rank in ranks) / whole[part] for part in PARTS}
    return {**copies, "reduced": _sent(ranks, *REDUCING) / whole["gradients"]}


def _judge_numbers(numbers, ranks, what):
    if not isinstance(numbers, dict) or set(numbers) != set(NUMBERS):
        got = f"the keys {sorted(map(str, numbers))}" if isinstance(numbers, dict) else kind_of(
            numbers)
        raise Wrong(f"{what}: the second value is {got}, not a dictionary with {list(NUMBERS)}")
    # Copies count over all ranks: one rank's share alone says nothing where shards are uneven.
    for key, want in evidence_of(ranks).items():
        title = f"copies of the {_NAMES[key]}" if key in PARTS else '"reduced"'
        judge_number(numbers[key], want, _causes(key, ranks), f"{what}: {title}",
                     hint=_HINT if key in PARTS else "", rel_tol=1e-6)


def _causes(key, ranks) -> list[Cause]:
    whole, count = ranks[0].whole, len(ranks)
    if key == "reduced":
        sent = _sent(ranks, *REDUCING)
        gradients = whole["gradients"]
        return [(_sent(ranks, "all_reduce") / gradients, "that counts all-reduces only",
                 "FSDP's gradients pass a reduce-scatter, others' a reduce."),
                (sum(call.bytes for call in ranks[0].calls) / gradients,
                 "that counts collectives that add nothing", "A broadcast or an all-gather carries "
                 "no sum: all_reduce, reduce_scatter and reduce do."),
                (sent / whole["parameters"], "that is in multiples of the parameters",
                 "Frozen parameters have no gradients."),
                (sent, "that is in bytes", "Divide by the bytes of all gradients."),
                (count * sent / gradients, "that is of all ranks", "One rank's calls are enough."),
                (2 * sent / gradients, "that counts an all-reduce twice",
                 "Bytes are logical here: a bucket counts once.")]
    held = [rank.held[key] for rank in ranks]
    return [(held[0] / whole[key], "that is rank 0's share alone", _HINT),
            (sum(held) / count / whole[key], "that is the mean of the ranks", _HINT),
            (max(held) / whole[key], "that is the largest rank's share", _HINT),
            (count * held[0] / whole[key], "that takes all ranks to hold what rank 0 holds",
             "Shards of whole parameters are uneven: add up."),
            (sum(held), "that is in bytes", "Divide by the bytes of a whole copy."),
            (sum(held) / ranks[0].whole["parameters"], "that is in multiples of the parameters",
             "Divide by a whole copy of the same part.")]


def _judge_name(name, want, ranks, what):
    if name not in KINDS:
        raise Wrong(f"{what}: the name is {name!r}, not one of {', '.join(KINDS)}",
                    "FSDP is ZeRO-3." * ("FSDP" in str(name)))
    if name != want:
        reason, hint = _reason(name, want, ranks)
        raise Wrong(f"{what}: you say {name}, it was {want}: {reason}", hint)


def _reason(name, want, ranks) -> tuple[str, str]:
    """What in the evidence contradicts the name, and a hint."""
    if "one process" in (name, want):
        return f"there {'is' if len(ranks) == 1 else 'are'} {counted(len(ranks), 'rank')}", (
            "A library may call collectives with one rank, too: count the ranks.")
    reduced = evidence_of(ranks)["reduced"]
    if "separate" in (name, want):
        # gradients that pass no sum over the ranks never meet; a printed loss does not count
        return (f"all-reduces, reduce-scatters and reduces have {reduced:.3g} times the bytes of "
                "the gradients", "Ranks that train one model add up all gradients, once a step.")
    for part in PARTS:  # each stage shards one part more
        sharded = [KINDS.index(kind) >= 5 - PARTS.index(part) for kind in (name, want)]
        if sharded[0] != sharded[1]:
            break
    copies = evidence_of(ranks)[part]
    return (f"its {counted(len(ranks), 'rank')} hold {copies:.3g} copies of the {_NAMES[part]} "
            f"together, which are {'sharded' if sharded[1] else 'not sharded'}",
            "Memory decides what is sharded: collectives of different stages look alike, and names "
            "of classes and libraries say what was asked for.")


def _sent(ranks, *kinds) -> int:
    """Bytes of rank 0's collectives of these kinds."""
    return sum(call.bytes for call in ranks[0].calls if call.kind in kinds)
