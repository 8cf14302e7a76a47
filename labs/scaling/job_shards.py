"""What the ranks of exercise 6.15's job.py store and gather: the model that its options ask for, in
shards, unit by unit, within a replica."""

from labs.checks.scripts.forked import Run
from labs.checks.verdicts import Wrong
from labs.scaling.expected_job import ExpectedJob
from labs.words import counted

SLACK = 1.1  # padding of shards
SMALL = 20  # an all-gather below 1/SMALL of all parameters may be somebody's metrics
_BOTH = ("fully_shard(block) for each of models.blocks(model), then fully_shard(model): the root "
         "shards what is left.")
_MESH = "fully_shard(..., mesh=mesh), with the mesh's dimensions (replicas, ranks of a replica)."


def judge_model(run: Run, when: str, expected: ExpectedJob, numbers: dict[str, float]) -> None:
    """Raises Wrong unless the ranks train the model of --layers and --hidden: another model's
    shards would look like too many, or too few."""
    want = expected.steps[0].gradients
    for rank, record in enumerate(run.records):
        others = set(want) ^ set(record.parameters) or {
            name for name, tensor in record.parameters.items()
            if _uncut(tensor.shape, record, name) != _uncut(want[name].shape, record, name)}
        if others:
            raise Wrong(f"{when}: rank {rank} trains another model than --layers "
                        f"{numbers['layers']} and --hidden {numbers['hidden']} ask for: "
                        f"{min(others)!r} differs", "models.gpt2(options.layers, options.hidden, "
                        "seed=options.seed)", code="wrong_model")


def _uncut(shape, record, name) -> list[int]:
    """The lengths of a parameter along the dimensions that are not sharded."""
    dim = record.shards.get(name, (None,))[0]
    return [length for at, length in enumerate(shape) if at != dim]


def judge_shards(run: Run, when: str, nbytes: int, replicas: int) -> None:
    """Raises Wrong unless each rank held its shard of `nbytes` of parameters before each step, in
    so many replicas, and gathered unit by unit within its replica."""
    shards = run.ranks // replicas
    for rank, record in enumerate(run.records):
        _judge_held(record, f"{when}: rank {rank}", nbytes, shards)
    _judge_units(run, when, nbytes)
    _judge_groups(run, when, nbytes, replicas)


def _judge_held(record, who, nbytes, shards):
    held, share = max(step.held for step in record.steps), nbytes / shards
    holds = f"{who} stores {held:,} bytes of parameters when it steps, its share is {share:,.0f}"
    whole = [name for name in record.parameters if name not in record.shards]
    # Invariant: when the optimizer steps, a rank holds 1/shards of the parameters. Catches a model
    # without fully_shard, and blocks that are sharded while the root is not.
    if held > SLACK * share:
        if not record.shards:
            raise Wrong(f"{holds}: no parameter is sharded", _BOTH, code="not_sharded")
        if whole:
            raise Wrong(f"{holds}: {whole[0]!r} and {counted(len(whole) - 1, 'more parameter')} "
                        "are not sharded", _BOTH, code="partly_sharded")
        raise Wrong(f"{holds}: its shards are too large, or units stay gathered", _MESH,
                    code="wrong_shards")
    if held < share / SLACK:
        raise Wrong(f"{holds}: the parameters are sharded into more than {shards} shards", _MESH,
                    code="too_many_shards")
    if whole:
        raise Wrong(f"{who}: {whole[0]!r} is no DTensor: fully_shard of torch.distributed.fsdp "
                    "has not sharded it", _BOTH, code="not_sharded")


def _judge_units(run, when, nbytes):
    """One unit for all gathers the full model at once, and shards save nothing at the peak."""
    # bytes
    largest = max((size for record in run.records for size, _ in record.gathered), default=0)
    if largest > nbytes / SLACK:
        raise Wrong(f"{when}: one all-gather brings {largest:,} of {nbytes:,} bytes of parameters: "
                    "the full model is one unit", _BOTH, code="one_unit")
    if largest < nbytes / SMALL:
        raise Wrong(f"{when}: no all-gather brings parameters to a rank", _BOTH,
                    code="not_gathered")


def _judge_groups(run, when, nbytes, replicas):
    """The replicas of a parameter are whole among themselves: none gathers from another."""
    groups = {members for record in run.records for size, members in record.gathered
              if size >= nbytes / SMALL}
    sizes = sorted({len(members) for members in groups})
    want = run.ranks // replicas
    # Invariant: parameters are gathered within a replica. Catches a mesh whose dimensions are
    # exchanged.
    if sizes != [want] or len(groups) != replicas:
        found = " and ".join(map(str, sorted(map(list, groups))))
        raise Wrong(f"{when}: parameters are gathered among ranks {found}; --replicas {replicas} "
                    f"asks for {counted(replicas, 'group')} of {want}", _MESH, code="wrong_group")
