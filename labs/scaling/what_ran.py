"""Exercise 6.11: what a data-parallel job really was, by what its ranks sent and held."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from labs.checks.guesses import guessed
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import (
    Mistake,
    as_number,
    common_cause,
    judge_number,
    require_named,
    require_several,
)
from labs.checks.on_ranks import on_ranks
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.meters.evidence import PARTS, RankStepRecord, StepEvidence
from labs.pictures.tables import Table
from labs.scaling import synthetic_jobs
from labs.scaling.started_jobs import KINDS, StartedJob
from labs.training import data, strategies
from labs.training.loop import ModuleAndOptimizer
from labs.training.models import DeepMLP, EdgeCaseModel, trainable
from labs.words import counted
from labs.workers import devices

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
NUMBERS = (*PARTS, "reduced")
_NAMES = {part: part.replace("_", " ") for part in PARTS}
_HINT = "Add up what all ranks hold: one copy where it is sharded, N copies where it is not."
_REDUCED = ("The bytes of rank 0's all_reduce, reduce_scatter and reduce, divided by those of a "
            "whole copy of the gradients.")


@check("6.11")
def check_what_ran(what_ran: Callable):
    """what_ran(ranks): (a name of KINDS, {part: copies, "reduced": ...}) of any job."""
    jobs, answers = list(chain(record_jobs(), synthetic_jobs.jobs())), []
    for what, _, ranks in jobs:
        kept = UnchangedInputs("what_ran", calls=[rank.calls for rank in ranks],
                               held=[rank.held for rank in ranks],
                               whole=[rank.whole for rank in ranks])
        name, numbers = require_several(what_ran(ranks), ("the name", "the numbers"),
                                        f"{what}: it returned")
        kept.judge()
        _require_keys(numbers, what)
        answers.append((name, numbers))
    by_job = [ranks for _, _, ranks in jobs]
    for at, (what, want, ranks) in enumerate(jobs):
        _judge_numbers([numbers for _, numbers in answers], by_job, at, what)
        _judge_name(answers[at][0], want, ranks, what)
    return f"{len(jobs)} jobs recognised, of real ranks and drawn at random, on 1 to 16 ranks"


def evidence_of(ranks: list[RankStepRecord]) -> dict[str, float]:
    """Part -> copies that all ranks hold together; "reduced" -> bytes that a rank's reducing
    collectives have, in multiples of its gradients'."""
    whole = ranks[0].whole
    copies = {part: sum(rank.held[part] for rank in ranks) / whole[part] for part in PARTS}
    return {**copies, "reduced": _sent(ranks, *REDUCING) / whole["gradients"]}


def _require_keys(numbers, what):
    if not isinstance(numbers, dict) or set(numbers) != set(NUMBERS):
        got = f"the keys {sorted(map(str, numbers))}" if isinstance(numbers, dict) else kind_of(
            numbers)
        raise Wrong(f"{what}: the second value is {got}, not a dictionary with {list(NUMBERS)}",
                    code="wrong_type")


def _judge_numbers(numbers, jobs, at, what):
    """numbers: the student's, one dictionary for each of the jobs."""
    # Copies count over all ranks: one rank's share alone says nothing where shards are uneven.
    for key, want in evidence_of(jobs[at]).items():
        title = f"copies of the {_NAMES[key]}" if key in PARTS else '"reduced"'
        answers = [as_number(each[key]) for each in numbers]
        judge_number(numbers[at][key], want, common_cause(_mistakes(key), jobs, answers, at),
                     f"{what}: {title}", rel_tol=1e-6, hint=_HINT if key in PARTS else _REDUCED)


def _times(key, change) -> Callable[[list[RankStepRecord]], float]:
    """What change(ranks) counts, in copies of this part."""
    return lambda ranks: change(ranks) / ranks[0].whole[key]


def _held(ranks, key) -> list[int]:
    return [rank.held[key] for rank in ranks]


def _all_sums(ranks) -> int:
    return _sent(ranks, *REDUCING)


def _mistakes(key) -> list[Mistake]:
    if key == "reduced":
        return [
            Mistake("counts_all_reduces",
                    _times("gradients", lambda ranks: _sent(ranks, "all_reduce")),
                    "that counts all-reduces only",
                    "FSDP's gradients pass a reduce-scatter, others' a reduce."),
            Mistake("reduces_not_counted",
                    _times("gradients", lambda ranks: _sent(ranks, "all_reduce", "reduce_scatter")),
                    "reduces are not counted",
                    "Of a reduce one rank has the sum: gradients may pass it."),
            Mistake("reduce_scatters_not_counted",
                    _times("gradients", lambda ranks: _sent(ranks, "all_reduce", "reduce")),
                    "reduce-scatters are not counted", "FSDP's gradients pass a reduce-scatter."),
            Mistake("all_reduces_not_counted",
                    _times("gradients", lambda ranks: _sent(ranks, "reduce_scatter", "reduce")),
                    "all-reduces are not counted", "DDP's gradients pass an all-reduce."),
            Mistake("counts_collectives_add_nothing",
                    _times("gradients", lambda ranks: sum(call.bytes for call in ranks[0].calls)),
                    "that counts collectives that add nothing", "A broadcast or an all-gather "
                    "carries no sum: all_reduce, reduce_scatter and reduce do."),
            Mistake("in_multiples_parameters", _times("parameters", _all_sums),
                    "that is in multiples of the parameters",
                    "Frozen parameters have no gradients."),
            Mistake("in_bytes", _all_sums, "that is in bytes",
                    "Divide by the bytes of all gradients."),
            Mistake("all_ranks", _times("gradients", lambda ranks: len(ranks) * _all_sums(ranks)),
                    "that is of all ranks", "One rank's calls are enough."),
            Mistake("counts_all_reduce_twice",
                    _times("gradients",
                           lambda ranks: _all_sums(ranks) + _sent(ranks, "all_reduce")),
                    "that counts an all-reduce twice",
                    "Bytes are logical here: a bucket counts once."),
            Mistake("counts_all_bytes_twice",
                    _times("gradients", lambda ranks: 2 * _all_sums(ranks)),
                    "that counts all bytes twice",
                    "Bytes are logical here: a bucket counts once.")]
    return [
        Mistake("rank_0_share_alone", _times(key, lambda ranks: ranks[0].held[key]),
                "that is rank 0's share alone", _HINT),
        Mistake("mean_ranks", _times(key, lambda ranks: sum(_held(ranks, key)) / len(ranks)),
                "that is the mean of the ranks", _HINT),
        Mistake("largest_rank_share", _times(key, lambda ranks: max(_held(ranks, key))),
                "that is the largest rank's share", _HINT),
        Mistake("takes_all_ranks_hold_rank",
                _times(key, lambda ranks: len(ranks) * ranks[0].held[key]),
                "that takes all ranks to hold what rank 0 holds",
                "Shards of whole parameters are uneven: add up."),
        Mistake("in_bytes", lambda ranks: sum(_held(ranks, key)), "that is in bytes",
                "Divide by the bytes of a whole copy."),
        Mistake("in_multiples_parameters",
                _times("parameters", lambda ranks: sum(_held(ranks, key))),
                "that is in multiples of the parameters",
                "Divide by a whole copy of the same part.")]


def _judge_name(name, want, ranks, what):
    if name not in KINDS:
        raise Wrong(f"{what}: the name is {name!r}, not one of {', '.join(KINDS)}",
                    "FSDP is ZeRO-3." * ("FSDP" in str(name)), code="unknown_name")
    if name != want:
        reason, hint = _reason(name, want, ranks)
        raise Wrong(f"{what}: you say {name}, it was {want}: {reason}", hint, code="wrong_strategy")


def _reason(name, want, ranks) -> tuple[str, str]:
    """What in the evidence contradicts the name, and a hint."""
    if "one process" in (name, want):
        return f"there {'is' if len(ranks) == 1 else 'are'} {counted(len(ranks), 'rank')}", (
            "A library may call collectives with one rank, too: count the ranks.")
    # Whether ranks train one model at all is asked first: only then do copies say how it is
    # sharded.
    reduced = evidence_of(ranks)["reduced"]
    if "separate" in (name, want):
        # gradients that pass no sum over the ranks never meet; a printed loss does not count
        return (f"all-reduces, reduce-scatters and reduces have {reduced:.3g} times the bytes of "
                "the gradients", "Ranks that train one model add up their gradients once a step: "
                "nearly all of them, because some may be missing. Separate ranks add up none.")
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


WORLD_SIZES = (1, 2, 3)
_STEPS = 3  # the last one is recorded: torch's DDP sets up in the first two
_MODELS = {"tied and frozen parameters": EdgeCaseModel,
           "odd sizes": partial(DeepMLP, layers=3, width=37),
           "64-bit numbers": lambda: DeepMLP(layers=2, width=21).double()}


def record_jobs() -> Iterator[tuple[str, str, list[RankStepRecord]]]:
    """(what it is, the right name, what each rank did) of every job."""
    for ranks in WORLD_SIZES:
        for (kind, model), found in _recorded(ranks, devices.device().type).items():
            yield (f"recorded on {ranks} rank{'s' * (ranks > 1)} with {model}",
                   kind if ranks > 1 else "one process", copy.deepcopy(found))


@functools.cache
def _recorded(ranks, device) -> dict[tuple[str, str], list[RankStepRecord]]:
    by_rank = on_ranks(_record, world_sizes=(ranks,), timeout=60.0)
    return {job: [found[job] for found in by_rank] for job in by_rank[0]}


def _record() -> dict[tuple[str, str], RankStepRecord]:
    """On a rank: (strategy's name, model's name) -> what this rank did."""
    chosen = {"separate": strategies.plain, "DDP": strategies.ddp,
              "ZeRO-1": strategies.zero_redundancy, "ZeRO-2": zero2, "ZeRO-3": strategies.fsdp2}
    return {(kind, name): _evidence(strategy, model) for kind, strategy in chosen.items()
            for name, model in _MODELS.items()}


def _evidence(strategy, make) -> RankStepRecord:
    model = make()
    evidence = StepEvidence(model)
    dtype = next(p.dtype for p in model.parameters())
    module, optimizer = strategy(model, torch.optim.AdamW, lr=1e-3)
    for batch in data.xy_batches(_STEPS, 6, seed=dist.get_rank()):
        if isinstance(model, EdgeCaseModel):
            # zero2 reduces in a hook of each parameter: where one rank does not use a layer, others
            # would wait.
            batch["use_all"] = True
        elif dtype == torch.float64:
            batch["x"] = batch["x"].double()
        with evidence:
            loss = module(**batch).loss
            loss.backward()
            evidence.note(module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())  # to print it: the gradients are not its business
    return evidence.of_this_rank()


def zero2(model, optimizer_class, **kwargs) -> ModuleAndOptimizer:
    """ZeRO-2 by whole parameters: a gradient is reduced to its parameter's owner during backward
    and freed on the others; owners broadcast what they have updated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    owners = {parameter: number % ranks for number, (_, parameter) in enumerate(trainable(model))}

    def keep_own(parameter):
        # Backward reaches the parameters in the same order on all ranks, so the reduces match. The
        # hook gets the parameter, and may free its gradient: it has accumulated.
        dist.reduce(parameter.grad, owners[parameter])
        if owners[parameter] != rank:
            parameter.grad = None

    def broadcast(*_):
        for parameter, owner in owners.items():
            dist.broadcast(parameter.data, owner)

    for parameter in owners:
        parameter.register_post_accumulate_grad_hook(keep_own)
    optimizer = optimizer_class([p for p, owner in owners.items() if owner == rank], **kwargs)
    optimizer.register_step_post_hook(broadcast)
    return model, optimizer


@shows("6.11")
def show_jobs(jobs: Mapping[str, StartedJob], what_ran: Callable) -> Table:
    """Returns a table of what the library calls each job, the name that the student's function
    gives it, and the student's numbers: the copies that all ranks hold together, and what they
    reduce."""
    rows, alone = [], []
    for how, job in jobs.items():
        name, numbers = named_by_student(what_ran, job.ranks, how)
        said = job.ranks[0].library.removeprefix("DistributedType.")
        rows.append((how, said, name, str(len(job.ranks)),
                     *(f"{numbers[each]:.3g}" for each in (*PARTS, "reduced"))))
        if len(job.ranks) == 1 and numbers["reduced"]:
            alone.append(how)
    notes = ["As many copies as ranks: each holds all of it. One copy: it is sharded. Nothing "
             "reduced: each rank trains a model of its own."]
    notes += [f"{' and '.join(alone)}: DDP calls its all-reduce with one rank too, which then "
              "sends nothing."] * bool(alone)
    if (guess := guessed("6.11")) is not None and "--cpu" in jobs:
        notes.append(f"Your guess for parameters with --cpu: {guess:g}.")
    return Table("copies that all ranks hold together, and × gradients reduced", (
        "started", "the library says", "what ran", "ranks",
        *(part.replace("_", " ") for part in PARTS), "reduced"), rows, left=2,
        note=" ".join(notes))


def named_by_student(what_ran, ranks, how) -> tuple[str, dict[str, float]]:
    """The student's name and numbers for the ranks of a job."""
    name, numbers = require_several(what_ran(ranks), ("the name", "the numbers"),
                                    f"{how}: it returned")
    if not isinstance(name, str):
        raise Wrong(f"{how}: what_ran returned {kind_of(name)} as the name, not a string",
                    f"One of {', '.join(KINDS)}.", code="wrong_type")
    return name, require_named(numbers, (*PARTS, "reduced"), f"{how}: what_ran")
