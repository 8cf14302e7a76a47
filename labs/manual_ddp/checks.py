"""Checks of exercises 2.1 to 2.4 and 2.8, 2.9: numbers against the twin, calls and bytes."""

import copy

import torch
import torch.distributed as dist

from labs.exercises import Wrong, check
from labs.manual_ddp import twin as twins
from labs.meters.traffic import Traffic
from labs.training import data
from labs.training.models import TrapModel, count
from labs.workers.launcher import launch

WORLD_SIZES = (2, 3, 4)


def on_ranks(fn, *args, world_sizes=WORLD_SIZES, hang_after=4.0) -> list:
    """`fn(*args)` on 2, 3 and 4 ranks, one after the other; all results in one list."""
    return [result for ranks in world_sizes
            for result in launch(fn, *args, ranks=ranks, quiet=True, device="cpu",
                                 hang_after=hang_after)]


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
    model = TrapModel()
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
        model = TrapModel(seed=rank)
        identities = [id(parameter) for parameter in model.parameters()]
        with twins.torchs_own_refused(), Traffic() as traffic:
            broadcast_state(model)
        twins.together(_judge_broadcast, model, identities, traffic)

    on_ranks(work)
    return "on 2, 3 and 4 ranks, all parameters and buffers equal rank 0's"


def _judge_broadcast(model, identities, traffic):
    rank = dist.get_rank()
    if not traffic.calls:
        raise Wrong("nothing was communicated: rank 0's state stayed where it was",
                    "It must travel to every rank.")
    _compare_broadcast(model, TrapModel(seed=0), TrapModel(seed=rank))
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
        model = TrapModel(seed=0)
        model(**data.shard(batch, rank, twin.ranks), use_rare=rank == 0).loss.backward()
        with twins.torchs_own_refused(), Traffic() as traffic:
            average_gradients(model)
        twin.loss(batch).backward()
        return twins.together(_judge_average, model, twin.model, own, traffic)

    return (f"gradients equal the full-batch twin's on 2, 3 and 4 ranks "
            f"(to {max(on_ranks(work)):.0e})")


def _judge_average(model, twin, own, traffic) -> float:
    twins.compare_state(model, twin, "after averaging the gradients")
    difference = twins.compare_gradients(model, twins.gradients(twin), own)
    _compare_bytes(traffic, 4 * count(model))
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
    model = TrapModel(seed=rank)
    with twins.torchs_own_refused():
        module = wrap(model)
    twins.together(_judge_start, model, twin.model)
    optimizer, difference, traffics = twins.sgd(model), 0.0, []
    for step, batch in enumerate(data.xy_batches(steps, twins.BATCH)):
        own = twin.own_gradients(batch)
        with Traffic() as traffic, twins.torchs_own_refused():
            loss = module(**data.shard(batch, rank, twin.ranks), use_rare=rare(rank)).loss
            loss.backward()
        twin.loss(batch).backward()
        difference = max(difference, twins.together(
            twins.compare_gradients, model, twins.gradients(twin.model), own, f"step {step}, "))
        for optimiser in (optimizer, twin.optimizer):
            optimiser.step()
            optimiser.zero_grad()
        twins.together(twins.compare_state, model, twin.model, f"after step {step}")
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
            twins.together(_compare_bytes, traffic, 4 * count(module))
        return max(difference, _difference_from_torchs(wrap))

    return (f"equals the full-batch twin and torch's DDP over 4 steps on 2, 3 and 4 ranks "
            f"(to {max(on_ranks(work)):.0e})")


def _difference_from_torchs(wrap) -> float:
    """Trains the student's module and torch's DDP side by side on the same batches."""
    from torch.nn.parallel import DistributedDataParallel

    rank, models = dist.get_rank(), [TrapModel(seed=5), TrapModel(seed=5)]
    modules = [wrap(models[0]), DistributedDataParallel(models[1])]
    optimizers = [twins.sgd(model) for model in models]
    for batch in data.xy_batches(3, twins.BATCH, seed=50):
        for module, optimizer in zip(modules, optimizers, strict=True):
            shard = data.shard(batch, rank, dist.get_world_size())
            module(**shard, use_rare=True).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.together(twins.compare_state, *models, "trained beside torch's DDP")
    return max(twins.worst(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(),
                                                 strict=True))


@check("2.8", hints={"not an iterator": "no_sync must `yield` once, where the block runs.",
                     "context manager": "Decorate no_sync with @contextlib.contextmanager."})
def check_no_sync(wrap):
    """wrap(model, cap_bytes).no_sync(): backward inside it communicates nothing, the next one
    outside it synchronizes all that was accumulated."""
    def work():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = TrapModel(seed=0)
        module, reference = wrap(model, 900), copy.deepcopy(model)
        batches = [data.shard(b, rank, ranks) for b in data.xy_batches(3, twins.BATCH)]
        for _ in range(2):  # the second time finds a flag that was not put back
            _check_accumulation(module, model, reference, batches)
            model.zero_grad()
        _check_exception(module, model, batches)

    on_ranks(work)
    return "no_sync communicates nothing; the next backward averages all that was accumulated"


def _check_accumulation(module, model, reference, batches):
    reference.zero_grad()
    with module.no_sync():
        for number, batch in enumerate(batches[:-1], 1):
            with Traffic() as quiet:
                module(**batch, use_rare=True).loss.backward()
            reference(**batch, use_rare=True).loss.backward()
            twins.together(_judge_inside, module, model, reference, quiet, number)
    with Traffic() as loud:
        module(**batches[-1], use_rare=True).loss.backward()
    reference(**batches[-1], use_rare=True).loss.backward()
    own = twins.gradients(reference)
    want = {name: gradient.clone() for name, gradient in own.items()}
    for gradient in want.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    twins.together(_judge_after, model, want, own, loud)


def _judge_after(model, want, own, loud):
    if not loud.calls:
        raise Wrong("after no_sync, backward still communicates nothing",
                    "Put the flag back when the block ends.")
    twins.compare_gradients(model, want, own, "after no_sync, ")


def _judge_inside(module, model, reference, traffic, number):
    if traffic.calls:
        flag = "self.synchronize is still True, and "
        raise Wrong(f"inside no_sync, {flag * module.synchronize}{len(traffic.calls)} collectives "
                    "were called", "Set self.synchronize to False before the `yield`.")
    got, want = twins.gradients(model), twins.gradients(reference)
    for name in want:
        if not twins.close(got[name], want[name]):
            raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: inside no_sync its gradient "
                        f"is not the sum of this rank's own after {number} backward passes",
                        "Inside no_sync, gradients accumulate locally: neither averaged nor lost.")


def _check_exception(module, model, batches):
    try:
        with module.no_sync():
            raise KeyError
    except KeyError:
        pass
    with Traffic() as traffic:
        module(**batches[0], use_rare=True).loss.backward()
    model.zero_grad()
    twins.together(_judge_exception, traffic)


def _judge_exception(traffic):
    if not traffic.calls:
        raise Wrong("an exception inside no_sync left the flag down: nothing communicates any more",
                    "Put the flag back in a `finally`.")


@check("2.9")
def check_accumulate(accumulate, wrap):
    """accumulate(module, micro_batches): the gradient of the mean loss over all examples of all
    ranks, one backward per micro-batch and one synchronization. Each is {"x", "y"}; their sizes
    differ within a rank and are the same on all ranks."""
    def work():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sizes = (3, 1, 2)
        [batch] = data.xy_batches(1, sum(sizes) * ranks)
        model, twin = TrapModel(seed=0), TrapModel(seed=0)
        passes = []
        model.head.weight.register_post_accumulate_grad_hook(passes.append)
        module = wrap(model, 900)
        mine = data.shard(batch, rank, ranks)
        micro = [dict(zip(mine, piece, strict=True))
                 for piece in zip(*(value.split(sizes) for value in mine.values()), strict=True)]
        with Traffic() as traffic:
            accumulate(module, micro)
        twin(**batch).loss.backward()
        _explain_accumulation(model, twins.gradients(twin), micro)
        twins.together(_judge_passes, len(passes), traffic, module, len(micro))

    on_ranks(work)
    return "unequal micro-batches give the full batch's gradient, with one synchronization"


def _judge_passes(passes, traffic, module, parts):
    if len(traffic.calls) != len(module.buckets):
        raise Wrong(f"{len(traffic.calls)} collectives for {parts} micro-batches; one "
                    f"synchronization takes {len(module.buckets)}",
                    "All but the last backward belong inside no_sync.")
    if passes != parts:
        raise Wrong(f"{passes} backward for {parts} micro-batches: what they all saved was held "
                    "in memory at once", "One backward for each micro-batch.")


def _explain_accumulation(model, want, micro):
    got = twins.gradients(model)
    fine = all(twins.close(got[name], want[name]) for name in want)
    if all(_everyone(fine)):
        return
    for (divide, sentence) in ((1, "the sum of the micro-batches' mean losses"),
                               (len(micro), "the plain mean of the micro-batches' mean losses")):
        wrong = TrapModel(seed=0)
        (sum(wrong(**part).loss for part in micro) / divide).backward()
        expected = twins.gradients(wrong)
        for gradient in expected.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        alike = all(twins.close(got[name], expected[name]) for name in expected)
        if all(_everyone(alike)):
            raise Wrong(f"the gradient is that of {sentence}",
                        "A micro-batch of 3 examples counts three times one of 1.")
    name = max(want, key=lambda name: twins.worst(got[name], want[name]))
    raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: gradient differs from the full "
                f"batch's by {twins.worst(got[name], want[name]):.2g}",
                "Weight each loss by its micro-batch's share; synchronize in the last backward.")


def _everyone(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _kind(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


