"""Flips bits while 4 ranks train, and shows who notices: the loss, digests of replicas, norms of
gradients, a second computation, or a digest of what must not change."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.faults.flipped_bit import flip_bit
from labs.meters.traffic import Traffic
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.surviving_failure.scaffold import digest, tensor_bytes
from labs.training import data, loop, models
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.progress import status

RANKS, CORRUPT = 4, 2  # the rank in which a bit flips
BITS = range(32)
STEPS_BEFORE, STEPS_AFTER = 12, 4  # steps of training before and after a flip
WARM_UP = 4  # of the steps before, which are not timed
ELEMENT = 777  # of the weight below
WEIGHT = "transformer.h.0.mlp.c_fc.weight"
_LARGE, _SMALL = 30, 20  # bits of a gradient: of the exponent, of the mantissa
Find = Callable[[nn.Module, dist.ProcessGroup], dict]


@dataclass
class Flipped:
    """What a flip of each bit did. losses: bit -> the mean loss of all ranks in each step after it;
    None: without a flip. weights: bit -> the weight after the flip, and None: before. found: bit ->
    what find_corrupt said after the last step. sent: bytes that a rank contributes to
    find_corrupt's collectives; model: bytes of parameters and buffers; seconds: of find_corrupt,
    and of a step."""

    losses: dict[int | None, list[float]] = field(default_factory=dict)
    weights: dict[int | None, float] = field(default_factory=dict)
    found: dict[int | None, dict] = field(default_factory=dict)
    sent: int = 0
    model: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0


def flip_every_bit(find_corrupt: Find) -> Flipped:
    """Trains under DDP and flips each bit of one weight of one replica, from the same state."""
    return launch(_flip_every_bit, find_corrupt, ranks=RANKS, quiet=True, hang_after=20)[0]


def flip_gradients(find_corrupt: Find) -> dict[str, tuple[bool, dict, bool, bool]]:
    """Where a bit flips -> whether the replicas differ, what find_corrupt says, whether a rank's
    norm of its own gradient is ten times that of the others, and whether the same gradient computed
    by another rank has another digest."""
    return launch(_flip_gradients, find_corrupt, ranks=RANKS, quiet=True, hang_after=20)[0]


def flip_in_layouts(find_corrupt: Find) -> dict[tuple[str, str], tuple[dict | None, list[int]]]:
    """(layout, when a bit flips) -> what find_corrupt says on the corrupt rank, None where there is
    no replica; and the ranks whose own digest is not what it was after the last step."""
    by_rank = launch(_flip_in_layouts, find_corrupt, ranks=RANKS, quiet=True, hang_after=20)
    return {case: (by_rank[CORRUPT][case][0],
                   [rank for rank, own in enumerate(by_rank) if own[case][1]])
            for case in by_rank[0]}


def _model() -> nn.Module:
    return models.move_to_rank(models.gpt2(layers=1, hidden=64, context=32))


def _batches(steps, rank) -> list[data.Batch]:
    shards = (data.shard(batch, rank, RANKS) for batch in data.lm_batches(steps, 4 * RANKS, 32))
    return [{name: part.to(devices.device()) for name, part in shard.items()} for shard in shards]


def _flip_every_bit(find_corrupt) -> Flipped:
    torch.set_num_threads(1)
    model, rank, result = _model(), dist.get_rank(), Flipped()
    module, batches = DistributedDataParallel(model), _batches(STEPS_BEFORE + STEPS_AFTER, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The first steps load kernels and set up collectives, which takes seconds on a GPU.
    _train(module, optimizer, batches[:WARM_UP])
    began = time.perf_counter()
    _train(module, optimizer, batches[WARM_UP:STEPS_BEFORE])
    result.step_seconds = (time.perf_counter() - began) / (STEPS_BEFORE - WARM_UP)
    weight = dict(model.named_parameters())[WEIGHT]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for bit in (None, *BITS):
        model.load_state_dict(saved[0])
        # It keeps the given tensors, and steps change them in place: a fresh copy for each bit.
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if bit is not None and rank == CORRUPT:
            flip_bit(weight, ELEMENT, bit)
        value = weight.detach().flatten()[ELEMENT].clone()
        dist.broadcast(value, CORRUPT)
        result.weights[bit] = value.item()
        result.losses[bit] = _train(module, optimizer, batches[STEPS_BEFORE:])
        began = time.perf_counter()
        result.found[bit] = find_corrupt(module, dist.group.WORLD)
        result.seconds = time.perf_counter() - began
    with Traffic() as traffic:
        find_corrupt(module, dist.group.WORLD)
    result.sent = sum(call.bytes // (call.ranks if call.kind == "all_gather" else 1)
                      for call in traffic.calls)
    result.model = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    return result


def _train(module, optimizer, batches) -> list[float]:
    """The mean loss of all ranks in each step."""
    losses = torch.tensor(loop.train(module, optimizer, batches), device=devices.device())
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


@dataclass
class _Gradients:
    """own: this rank's gradients before they are averaged. bit: of one element that flips then."""

    own: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    bit: int | None = None


def _keep_and_average(kept: _Gradients, bucket: dist.GradBucket
                      ) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP."""
    # Before the all-reduce the wrong value enters the mean, so all replicas get the same wrong
    # gradient and stay equal: digests of replicas cannot find it.
    if kept.bit is not None and bucket.is_last():
        flip_bit(bucket.gradients()[0], 5, kept.bit)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        kept.own[parameter] = gradient.clone()
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _flip_gradients(find_corrupt) -> dict:
    torch.set_num_threads(1)
    rank, found = dist.get_rank(), {}
    cases = {"nothing": None, "parameter": _SMALL, "gradient, after the all-reduce": _SMALL,
             "gradient, before it, low bit": _SMALL, "gradient, before it, high bit": _LARGE}
    for case, bit in cases.items():
        model, kept = _model(), _Gradients()
        module = DistributedDataParallel(model)
        module.register_comm_hook(kept, _keep_and_average)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        _train(module, optimizer, _batches(2, rank))
        weight = dict(model.named_parameters())[WEIGHT]
        kept.bit = bit if rank == CORRUPT and "before" in case else None
        [batch] = _batches(1, rank)
        module(**batch).loss.backward()
        second = _computed_twice(model, kept)
        if rank == CORRUPT and "after" in case:
            flip_bit(weight.grad, ELEMENT, bit)
        optimizer.step()
        if rank == CORRUPT and case == "parameter":
            flip_bit(weight, ELEMENT, bit)
        said = find_corrupt(module, dist.group.WORLD)
        digests = _gathered(digest(b"".join(map(tensor_bytes, model.parameters()))))
        norms = _gathered(float(torch.stack([each.norm() for each in kept.own.values()]).norm()))
        is_odd = not max(norms) < 10 * sorted(norms)[RANKS // 2]  # also of inf and NaN
        found[case] = len(set(digests)) > 1, said, is_odd, second
    return found


def _computed_twice(model, kept) -> bool:
    """Whether the next rank gets another digest for this rank's gradients than it has itself, on
    any rank. The parameters are still equal on all."""
    rank = dist.get_rank()
    [batch] = _batches(1, (rank - 1) % RANKS)
    # The bare model and autograd.grad: DDP's hooks, and its all-reduce, do not run, and .grad
    # stays.
    again = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    own = _gathered(digest(b"".join(tensor_bytes(kept.own[each]) for each in model.parameters())))
    other = _gathered(digest(b"".join(map(tensor_bytes, again))))
    return any(other[(at + 1) % RANKS] != own[at] for at in range(RANKS))


def _gathered(value) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _flip_in_layouts(find_corrupt) -> dict:
    torch.set_num_threads(1)
    found = {}
    # All ranks call new_group for each group, their own or not.
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    for layout in ("DDP, 4 replicas", "HSDP, 2 replicas of 2 shards", "FSDP, 4 shards"):
        for when in ("between two steps", "inside the optimizer's step"):
            module, group = _laid_out(layout, alone)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
            is_corrupt = dist.get_rank() == CORRUPT
            tensor = next(each for name, each in module.named_parameters() if name.endswith(WEIGHT))
            batches = _batches(3, dist.get_rank())
            _train(module, optimizer, batches[:2])
            # As part of the optimizer's step: the rank's own digest is taken after it, and cannot
            # tell.
            if is_corrupt and when.startswith("inside"):
                flip_bit(tensor, 7, _SMALL)
            kept = _own_digest(module)
            if is_corrupt and when.startswith("between"):
                flip_bit(tensor, 7, _SMALL)
            module(**batches[2]).loss.backward()
            _after_backward(module)
            said = find_corrupt(module, group) if group is not alone else None
            found[layout, when] = said, _own_digest(module) != kept
    return found


def _own_digest(module) -> str:
    return digest(b"".join(map(tensor_bytes, module.parameters())))


def _after_backward(module) -> None:
    """Frees what FSDP has gathered for forward and backward."""
    if hasattr(module, "reshard"):
        module.reshard()


def _laid_out(layout, alone) -> tuple[nn.Module, dist.ProcessGroup]:
    """The module, and the ranks that have the same as this one."""
    from torch.distributed.fsdp import fully_shard

    model, kind = _model(), devices.device().type
    if layout.startswith("DDP"):
        return DistributedDataParallel(model), dist.group.WORLD
    if layout.startswith("FSDP"):
        return fully_shard(model, mesh=init_device_mesh(kind, (RANKS,))), alone
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh), mesh["replicate"].get_group()


_LOWEST, _HIGHEST = 1e-9, 1e3  # of the axis; equal losses stand at the bottom, NaN at the top
_FOUND, _MISSED = palette.RUNS[1], palette.RANK_FAILED


@shows("8.10")
def show_flips(find_corrupt: Callable) -> Picture:
    """Draws by how much each bit of one weight of one replica, flipped, changes the mean loss of
    the next steps, beside its change from one batch to the next, and whether find_corrupt
    names the replica after these steps."""
    with status(f"flipping {len(BITS)} bits on {RANKS} ranks"):
        flipped = flip_every_bit(find_corrupt)
    plain = flipped.losses[None]
    usual = max(abs(after / before - 1)
                for before, after in zip(plain, plain[1:], strict=False))
    changes = {bit: max(_change(loss, before) for loss, before in
                        zip(flipped.losses[bit], plain, strict=True)) for bit in BITS}
    named = [bit for bit in BITS if [CORRUPT] in flipped.found[bit].values()]
    shown = [bit for bit, change in changes.items() if not change <= usual]
    guess, bits = guessed("8.10"), len(BITS)
    figure, ax = canvas(WIDTH, 3.5 + marks.HEADLINE + marks.NOTE_LINE * (guess is not None))
    lesson = (f"The loss shows {len(shown)} of {bits} flipped bits; digests name the rank after "
              f"{len(named)}")
    answer = marks.answered(guess, len(shown), f"of {bits} bits")
    marks.headline(figure, lesson)
    marks.note_below(figure, answer)
    ax.axhspan(_LOWEST, usual, color=palette.GRID, zorder=0)
    for bit, change in changes.items():
        height = _HIGHEST if math.isnan(change) else min(max(change, _LOWEST), _HIGHEST)
        colour = _FOUND if bit in named else _MISSED
        ax.plot([bit, bit], [_LOWEST, height], color=colour, linewidth=1.4)
        ax.plot(bit, height, "o" if bit in named else "X", color=colour, markersize=7,
                clip_on=False, zorder=3)
        if math.isnan(change):
            ax.annotate("NaN", (bit, height), xytext=(-9, 0), textcoords="offset points",
                        ha="right", va="center", fontsize=9.5)
    _set_axes(ax)
    marks.legend_above(figure, [
        Line2D([], [], linestyle="", marker="o", color=_FOUND, label="digests name the rank"),
        Line2D([], [], linestyle="", marker="X", color=_MISSED, label="all replicas are equal"),
        Patch(color=palette.GRID, label="changes from one batch to the next")])
    words = [lesson, *_words(flipped, usual, shown, named), *filter(None, [answer])]
    return Picture(figure, "\n".join(words), data=(flipped, guess))


def _change(loss, before) -> float:
    return abs(loss / before - 1) if math.isfinite(loss) else math.nan


def _set_axes(ax):
    ax.set_yscale("log")
    ax.set_ylim(_LOWEST, _HIGHEST)
    ax.set_yticks([1e-7, 1e-4, 1e-1], ["1e-7", "1e-4", "0.1"])
    ax.set_xticks([0, 10, 22, 30, 31], ["0", "10", "22", "30", "31\nsign"])
    ax.set_xlabel("bit of a float32 weight: 0 to 22 mantissa, 23 to 30 exponent")
    ax.set_ylabel(f"largest relative change\nof the loss in {STEPS_AFTER} steps")


def _words(flipped, usual, shown, named) -> list[str]:
    return [
        f"{RANKS} replicas, one bit of one weight flips on rank {CORRUPT}; the weight "
        f"was {flipped.weights[None]:.4g}",
        f"bits that change the loss by more than the next batch does, {usual:.0%}: "
        f"{len(shown)} of {len(flipped.weights) - 1}: {_list(shown)}",
        f"bits after which find_corrupt names the rank, {STEPS_AFTER} steps later: {len(named)}; "
        f"all replicas are equal after bits {_list(set(BITS) - set(named))}",
        f"one call: {1e3 * flipped.seconds:.0f} ms, a step {1e3 * flipped.step_seconds:.0f} ms; a "
        f"rank gives {flipped.sent:,} bytes, its replica has {flipped.model:,}"]


def _list(bits) -> str:
    return ", ".join(map(str, sorted(bits))) or "none"


@shows("8.10")
def show_gradient_flips(find_corrupt: Callable) -> Table:
    """Who notices a flip in a parameter, in the averaged gradient, and in a rank's own."""
    with status(f"flipping bits of gradients on {RANKS} ranks"):
        found = flip_gradients(find_corrupt)
    rows = [(place, "differ" if differ else "equal", _said(said),
             "ten times" if is_odd else "as others", "differ" if second else "equal")
            for place, (differ, said, is_odd, second) in found.items()]
    return Table(f"A bit flips on rank {CORRUPT} of {RANKS}, in its", (
        "", "replicas", "find_corrupt", "norm of its own gradient", "gradient computed twice"),
        rows, left=1)


@shows("8.10")
def show_layouts(find_corrupt: Callable) -> Table:
    """Who notices a flip of a parameter, by layout and by the moment at which it happens."""
    with status(f"three layouts on {RANKS} ranks"):
        found = flip_in_layouts(find_corrupt)
    rows = [(layout, when, "no replica" if said is None else _said(said),
             f"rank {changed[0]}" if changed else "nothing")
            for (layout, when), (said, changed) in found.items()]
    return Table(f"A parameter of rank {CORRUPT} is corrupt", (
        "layout", "since when", "find_corrupt", "own digest, after a step and before the next"),
        rows, left=2)


def _said(found) -> str:
    if not found:
        return "nothing"
    [ranks, *_] = found.values()
    return f"rank {', '.join(map(str, ranks))}" if ranks else "they differ"
