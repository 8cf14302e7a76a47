"""Exercise 6.15: which part of the parameters each rank held, and among which ranks they were
gathered, as the ranks' own memory and collectives say."""

from labs.exercises.scripts.forked import Run
from labs.exercises.verdicts import Wrong
from labs.words import counted

SLACK = 1.1  # padding of shards
SMALL = 20  # an all-gather below 1/SMALL of all parameters may be somebody's metrics
_BOTH = ("fully_shard(block) for each of models.blocks(model), then fully_shard(model): the root "
         "shards what is left.")
_MESH = "fully_shard(..., mesh=mesh), with the mesh's dimensions (replicas, ranks of a replica)."


def judge(run: Run, when: str, nbytes: int, replicas: int) -> None:
    """Raises Wrong unless each rank held its shard of `nbytes` of parameters before each step, in
    so many replicas, and gathered unit by unit within its replica."""
    shards = run.ranks // replicas
    for rank, record in enumerate(run.records):
        _judge_held(record, f"{when}: rank {rank}", nbytes, shards)
    _judge_units(run, when, nbytes)
    _judge_groups(run, when, nbytes, replicas)


def _judge_held(record, who, nbytes, shards):
    held, share = max(step.held for step in record.steps), nbytes / shards
    holds = f"{who} holds {held:,} bytes of parameters when it steps, and its share is {share:,.0f}"
    whole = [name for name in record.parameters if name not in record.shards]
    if held > SLACK * share:
        if not record.shards:
            raise Wrong(f"{holds}: no parameter is sharded", _BOTH, code="not_sharded")
        if whole:
            raise Wrong(f"{holds}: {whole[0]!r} and {counted(len(whole) - 1, 'more parameter')} "
                        "are whole", _BOTH, code="partly_sharded")
        raise Wrong(f"{holds}: its shards are too large, or units stay gathered", _MESH,
                    code="wrong_shards")
    if held < share / SLACK:
        raise Wrong(f"{holds}: the parameters are cut into more than {shards} shards", _MESH,
                    code="too_many_shards")
    if whole:
        raise Wrong(f"{who}: {whole[0]!r} is no DTensor: fully_shard of torch.distributed.fsdp "
                    "has not sharded it", _BOTH, code="not_sharded")


def _judge_units(run, when, nbytes):
    """One unit for all gathers the whole model at once, and shards save nothing at the peak."""
    largest = max((size for record in run.records for size, _ in record.gathered), default=0)
    if largest > nbytes / SLACK:
        raise Wrong(f"{when}: one all-gather brings {largest:,} of {nbytes:,} bytes of parameters: "
                    "the whole model is one unit", _BOTH, code="one_unit")
    if largest < nbytes / SMALL:
        raise Wrong(f"{when}: no all-gather brings parameters to a rank", _BOTH,
                    code="not_gathered")


def _judge_groups(run, when, nbytes, replicas):
    """The replicas of a parameter are whole among themselves: none gathers from another."""
    groups = {members for record in run.records for size, members in record.gathered
              if size >= nbytes / SMALL}
    sizes = sorted({len(members) for members in groups})
    want = run.ranks // replicas
    if sizes != [want] or len(groups) != replicas:
        found = " and ".join(map(str, sorted(map(list, groups))))
        raise Wrong(f"{when}: parameters are gathered among ranks {found}; --replicas {replicas} "
                    f"asks for {counted(replicas, 'group')} of {want}", _MESH, code="wrong_group")
