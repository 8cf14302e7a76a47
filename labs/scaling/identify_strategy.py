"""Exercise 6.11: which strategy a data-parallel job used, by its traffic and its memory."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from labs.checks.generator import unless_graded
from labs.checks.guesses import guessed
from labs.checks.inputs import UnchangedInputs
from labs.checks.on_ranks import on_ranks
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.meters.evidence import PARTS, RankStepRecord, StepEvidence
from labs.pictures import marks
from labs.pictures.tables import Table
from labs.scaling import synthetic_jobs
from labs.scaling.started_jobs import KINDS, StartedJob
from labs.training import data, strategies
from labs.training.loop import ModuleAndOptimizer
from labs.training.models import DeepMLP, EdgeCaseModel, trainable
from labs.words import counted
from labs.workers import devices

_NAMES = {part: part.replace("_", " ") for part in PARTS}


@check("6.11")
def check_identify_strategy(identify_strategy: Callable):
    """identify_strategy(ranks): the name, one of KINDS, of any job."""
    jobs = list(chain(record_jobs(), synthetic_jobs.jobs()))
    for what, want, ranks in jobs:
        kept = UnchangedInputs("identify_strategy", calls=[rank.calls for rank in ranks],
                               held=[rank.held for rank in ranks],
                               whole=[rank.whole for rank in ranks])
        name = identify_strategy(ranks)
        kept.judge()
        _judge_name(name, want, ranks, what)
    return f"{len(jobs)} jobs recognised, recorded and random, on 1 to 16 ranks"


def copies_of(ranks: list[RankStepRecord]) -> dict[str, float]:
    """Part -> copies that are resident on all ranks together."""
    return {part: sum(rank.resident[part] for rank in ranks) for part in PARTS}


def _judge_name(name, want, ranks, what):
    _require_name(name, what)
    if name != want:
        reason, hint = _reason(name, want, ranks)
        raise Wrong(f"{what}: you say {name}, it was {unless_graded(want)}: {reason}", hint,
                    code="wrong_strategy")


def _require_name(name, what):
    """Raises Wrong unless the name is a string, and one of KINDS."""
    if not isinstance(name, str):
        raise Wrong(f"{what}: identify_strategy returned {kind_of(name)}, not a string",
                    f"One of {', '.join(KINDS)}.", code="wrong_type")
    if name not in KINDS:
        raise Wrong(f"{what}: identify_strategy returned {name!r}, not one of {', '.join(KINDS)}",
                    "FSDP is ZeRO-3." * ("FSDP" in name), code="unknown_name")


def _reason(name, want, ranks) -> tuple[str, str]:
    """What in the evidence contradicts the name, and a hint."""
    if "one process" in (name, want):
        return f"there {'is' if len(ranks) == 1 else 'are'} {counted(len(ranks), 'rank')}", (
            "A library may call collectives with one rank, too: count the ranks.")
    # Whether ranks train one model at all is asked first: only then do copies say how it is
    # sharded.
    reduced = ranks[0].reduced
    if "separate" in (name, want):
        # gradients that pass no sum over the ranks never meet; a printed loss does not count
        return (f"all-reduces, reduce-scatters and reduces have {reduced:.3g} times the bytes of "
                "the gradients", "Ranks that train one model reduce their gradients once a step: "
                "nearly all of them, because some may be missing. Separate ranks reduce none.")
    for part in PARTS:  # each stage shards one part more
        sharded = [KINDS.index(kind) >= 5 - PARTS.index(part) for kind in (name, want)]
        if sharded[0] != sharded[1]:
            break
    copies = copies_of(ranks)[part]
    return (f"its {counted(len(ranks), 'rank')} store {copies:.3g} copies of the {_NAMES[part]} "
            f"together, which are {'sharded' if sharded[1] else 'not sharded'}",
            "Memory decides what is sharded: collectives of different stages look alike, and names "
            "of classes and libraries say what was asked for.")


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
    """ZeRO-2 that never splits a parameter: its gradient is reduced to its owner during backward,
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
def show_jobs(jobs: Mapping[str, StartedJob], identify_strategy: Callable) -> Table:
    """Returns a table of what the library calls each job, the name that the student's function
    gives it, and the evidence: the copies that are resident on all ranks together, and what they
    reduce."""
    rows, alone = [], []
    for how, job in jobs.items():
        name = identify_strategy(job.ranks)
        _require_name(name, how)
        said = job.ranks[0].library.removeprefix("DistributedType.")
        rows.append((how, said, name, str(len(job.ranks)), *(
            f"{number:.3g}" for number in (*copies_of(job.ranks).values(), job.ranks[0].reduced))))
        if len(job.ranks) == 1 and job.ranks[0].reduced:
            alone.append(how)
    notes = ["As many copies as ranks: not sharded. One copy: sharded. Nothing reduced: each rank "
             "trains a model of its own."]
    notes += [f"{' and '.join(alone)}: DDP calls its all-reduce with one rank too, which then "
              "sends nothing."] * bool(alone)
    if "--cpu" in jobs:
        notes += filter(None, [marks.answered(
            guessed("6.11"), copies_of(jobs["--cpu"].ranks)["parameters"], "copies with --cpu")])
    return Table("copies that are resident on all ranks together, and × gradients reduced", (
        "started", "the library says", "your function says", "ranks",
        *(part.replace("_", " ") for part in PARTS), "reduced"), rows, left=2,
        note=" ".join(notes))
