"""Checks of exercises 2.1 to 2.4: numbers against the twin, calls and bytes."""


import torch
import torch.distributed as dist

from labs.exercises.on_ranks import on_ranks
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.manual_ddp import twin as twins
from labs.meters.traffic import Traffic
from labs.training import data
from labs.training.models import EdgeCaseModel, count_trainable


@check("2.1")
def check_combine(combine):
    """combine(gradients, sizes): the full batch's gradient from those of its shards."""
    for sizes in ([6, 6], [3, 1, 8], [1, 2, 4, 5], [12]):
        want, pieces = gradients_of_shards(sizes)
        got = combine([piece.clone() for piece in pieces], list(sizes))
        _compare_combined(as_gradient(got, want), want, pieces, sizes)
    return "the shards' gradients give the full batch's, for equal and unequal shards"


def gradients_of_shards(sizes) -> tuple:
    """(gradient of a batch, [gradients of its shards of these sizes]) of one small weight."""
    model = EdgeCaseModel()
    [batch] = data.xy_batches(1, sum(sizes))

    def gradient(part):
        model.zero_grad()
        model(**part).loss.backward()
        return model.first.weight.grad.clone()

    parts = zip(*(value.split(sizes) for value in batch.values()), strict=True)
    return gradient(batch), [gradient(dict(zip(batch, part, strict=True))) for part in parts]


def as_gradient(got, want):
    """`got`, if it is a tensor of the shape of `want`. Raises Wrong."""
    if isinstance(got, torch.Tensor) and got.shape == want.shape:
        return got
    raise Wrong(f"combine returned {_kind(got)}, not a gradient of shape {tuple(want.shape)}",
                "Return one tensor: the weighted sum of the gradients.")


def _compare_combined(got, want, pieces, sizes):
    if twins.close(got, want):
        return
    shards = f"shards of {sizes} examples"
    if twins.close(got, sum(pieces)):
        raise Wrong(f"{shards}: the result is the sum of the gradients",
                    "Each mean must count by its share of the batch.")
    if twins.close(got, sum(pieces) / len(pieces)):
        raise Wrong(f"{shards}: the result is the plain mean of the gradients",
                    "A shard of 8 counts eight times a shard of 1.")
    ratio = (got.norm() / want.norm()).item()
    if twins.close(got, want * ratio):
        raise Wrong(f"{shards}: the direction is right, the length is {ratio:.3g}x",
                    "The weights must add up to 1.")
    raise Wrong(f"{shards}: the result differs from the full batch's gradient by "
                f"{twins.worst(got, want):.2g}", "Weight each gradient by size / total size.")


@check("2.2")
def check_broadcast_state(broadcast_state):
    """broadcast_state(model): afterwards every rank holds rank 0's parameters and buffers."""
    def work():
        rank = dist.get_rank()
        model = EdgeCaseModel(seed=rank)
        identities = [id(parameter) for parameter in model.parameters()]
        with twins.torchs_own_refused(), Traffic() as traffic:
            broadcast_state(model)
        twins.raise_on_all_ranks(_judge_broadcast, model, identities, traffic)

    on_ranks(work)
    return "on 2, 3 and 4 ranks, all parameters and buffers equal rank 0's"


def _judge_broadcast(model, identities, traffic):
    rank = dist.get_rank()
    if not traffic.calls:
        raise Wrong("nothing was communicated: rank 0's state stayed where it was",
                    "It must travel to every rank.")
    _compare_broadcast(model, EdgeCaseModel(seed=0), EdgeCaseModel(seed=rank))
    if identities != [id(parameter) for parameter in model.parameters()]:
        raise Wrong(f"rank {rank}: the parameters were replaced by new ones",
                    "Write into the tensors: an optimizer made earlier still holds them.")


def _compare_broadcast(model, first, own):
    rank = dist.get_rank()
    mine, want, before = (m.state_dict() for m in (model, first, own))
    for name in want:
        if twins.close(mine[name], want[name]):
            continue
        kind = "buffer" if name in dict(model.named_buffers()) else "parameter"
        who = f"rank {rank}, {kind} {name!r}"
        if rank == 0:
            raise Wrong(f"{who}: rank 0's own state changed", "Rank 0 sends, it does not receive.")
        if twins.close(mine[name], before[name]):
            raise Wrong(f"{who} is still this rank's own",
                        "Buffers and frozen parameters are state too; write into the tensor.")
        raise Wrong(f"{who} is neither rank 0's nor this rank's own", "Broadcast from rank 0.")


@check("2.3", hints={"not in the same collective":
                     "A rank that did not use a parameter takes part with zeros."})
def check_average_gradients(average_gradients):
    """average_gradients(model): after backward, every gradient becomes the mean over ranks."""
    def work():
        # only rank 0's shard takes the branch: elsewhere its gradients are None
        twin = twins.Twin(rare=lambda rank: rank == 0)
        rank, [batch] = dist.get_rank(), data.xy_batches(1, twins.BATCH)
        own = twin.own_gradients(batch)
        model = EdgeCaseModel(seed=0)
        model(**data.shard(batch, rank, twin.ranks), use_all=rank == 0).loss.backward()
        with twins.torchs_own_refused(), Traffic() as traffic:
            average_gradients(model)
        twin.loss(batch).backward()
        return twins.raise_on_all_ranks(_judge_average, model, twin.model, own, traffic)

    return (f"gradients equal the full-batch twin's on 2, 3 and 4 ranks "
            f"(to {max(on_ranks(work)):.0e})")


def _judge_average(model, twin, own, traffic) -> float:
    twins.compare_state(model, twin, "after averaging the gradients")
    difference = twins.compare_gradients(model, twins.gradients(twin), own)
    _compare_bytes(traffic, 4 * count_trainable(model))
    return difference


def _compare_bytes(traffic, want):
    if traffic.bytes > want:
        raise Wrong(f"rank {dist.get_rank()} communicated {traffic.bytes:,} bytes, "
                    f"{traffic.bytes / want:.1f}x the {want:,} bytes of its gradients",
                    "One all-reduce of each gradient is enough.")
    if traffic.bytes < want:
        raise Wrong(f"rank {dist.get_rank()} communicated {traffic.bytes:,} bytes; its gradients "
                    f"have {want:,}", "Every trainable parameter's gradient must travel.")


def follow_twin(wrap, steps=4, rare=lambda rank: True):
    """On a rank: trains `wrap(model)` beside the twin and compares after every backward and every
    step. Returns (largest difference, the traffic of each step, the wrapped module)."""
    rank, twin = dist.get_rank(), twins.Twin(rare=rare)
    model = EdgeCaseModel(seed=rank)
    with twins.torchs_own_refused():
        module = wrap(model)
    twins.raise_on_all_ranks(_judge_start, model, twin.model)
    optimizer, difference, traffics = twins.sgd(model), 0.0, []
    for step, batch in enumerate(data.xy_batches(steps, twins.BATCH)):
        own = twin.own_gradients(batch)
        with Traffic() as traffic, twins.torchs_own_refused():
            loss = module(**data.shard(batch, rank, twin.ranks), use_all=rare(rank)).loss
            loss.backward()
        twin.loss(batch).backward()
        difference = max(difference, twins.raise_on_all_ranks(
            twins.compare_gradients, model, twins.gradients(twin.model), own, f"step {step}, "))
        for optimiser in (optimizer, twin.optimizer):
            optimiser.step()
            optimiser.zero_grad()
        twins.raise_on_all_ranks(twins.compare_state, model, twin.model, f"after step {step}")
        traffics.append(traffic)
    return difference, traffics, module


def _judge_start(model, twin):
    try:
        twins.compare_state(model, twin, "after wrapping")
    except Wrong as wrong:
        raise Wrong(wrong.sentence,
                    "The ranks must begin alike: call broadcast_state in __init__.") from None


@check("2.4")
def check_manual_ddp(wrap):
    """wrap(model), for example the class ManualDDP: a module that trains as the twin does."""
    def work():
        difference, traffics, module = follow_twin(wrap)
        for traffic in traffics:
            twins.raise_on_all_ranks(_compare_bytes, traffic, 4 * count_trainable(module))
        return max(difference, _difference_from_torchs(wrap))

    return (f"equals the full-batch twin and torch's DDP over 4 steps on 2, 3 and 4 ranks "
            f"(to {max(on_ranks(work)):.0e})")


def _difference_from_torchs(wrap) -> float:
    """Trains the student's module and torch's DDP side by side on the same batches."""
    from torch.nn.parallel import DistributedDataParallel

    rank, models = dist.get_rank(), [EdgeCaseModel(seed=5), EdgeCaseModel(seed=5)]
    modules = [wrap(models[0]), DistributedDataParallel(models[1])]
    optimizers = [twins.sgd(model) for model in models]
    for batch in data.xy_batches(3, twins.BATCH, seed=50):
        for module, optimizer in zip(modules, optimizers, strict=True):
            shard = data.shard(batch, rank, dist.get_world_size())
            module(**shard, use_all=True).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.raise_on_all_ranks(twins.compare_state, *models, "trained beside torch's DDP")
    return max(twins.worst(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(),
                                                 strict=True))


def _kind(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return kind_of(value)


