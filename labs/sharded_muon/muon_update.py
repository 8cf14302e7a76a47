"""Exercise 7.13: Muon's update where ranks have pieces of matrices."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.checks.inputs import UnchangedInputs, require_dtype
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.tolerances import NEWTON_SCHULZ
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.meters.traffic import CollectiveCall, Traffic
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.predictions.communication.traffic import passes
from labs.sharded_muon.scaffold import newton_schulz, pieces_of, shard_length
from labs.tensor_parallel.message_order import PEERS, MessageOrder, require_no_deadlock
from labs.tensor_parallel.ring_cases import groups_on
from labs.training import data, models
from labs.workers import devices

# One matrix on three ranks, tall and wide ones, and a length that nothing divides; then matrices of
# which few cross a boundary, and on 3 ranks none.
SHAPES = [(4, 6), (7, 3), (12, 10), (5, 5), (3, 7), (3, 8)]
COUNTED = [(8, 8)] * 9
STEPS, MICRO_BATCHES, BETA = 3, 2, 0.95
HINTS = {"not part of group": PEERS, "Pair is not connected": PEERS}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "all_to_all")


@check("7.13", hints=HINTS)
def check_muon_update(muon_update: Callable):
    """muon_update(gradients, momentum, shapes, group): this rank's shard of the update, equal to
    that of full matrices; momentum, a shard, is updated in place."""
    for ranks in (2, 3, 4):
        with devices.send_recv_device(ranks):
            on_ranks(_judge, muon_update, world_sizes=(ranks,))
    return (f"over {STEPS} steps the update is that of full matrices, also where one lies on 3 "
            "ranks; gradients are reduced once, and only matrices on a boundary are sent")


def _judge(muon_update):
    # A group below all ranks, too: there a number in the group is not the rank.
    for group in groups_on(dist.get_world_size()):
        _try_steps(muon_update, SHAPES, group)
    calls, order = _try_steps(muon_update, COUNTED, dist.group.WORLD)
    raise_on_all_ranks(_judge_traffic, calls)
    require_no_deadlock(order.of_all())


def _try_steps(muon_update, shapes, group) -> tuple[list[CollectiveCall], MessageOrder | None]:
    """Judges some steps; the calls and messages of the last one. A rank outside of the group only
    listens."""
    calls, last = [], None
    run = Reference(shapes, group) if group else None
    for step in range(STEPS):
        if run is None:
            # A collective of all ranks: a rank outside of the group calls it as often as the
            # others.
            raise_on_all_ranks(lambda: None)
            continue
        local = run.draw(step)
        kept = UnchangedInputs("muon_update", gradients=local)
        with MessageOrder() as order, Traffic() as traffic, traffic.marked_waits():
            update = muon_update(local, run.momentum, shapes, group)
            forgotten = traffic.never_waited_for()
        raise_on_all_ranks(_judge_step, update, run, kept, forgotten, step)
        calls, last = traffic.calls, order
    return calls, last


class Reference:
    """The same steps on full matrices, on every rank of a group. momentum: the shard that the
    student's function updates; whole: what it should be, of all shards."""

    def __init__(self, shapes, group):
        self.shapes, self.group = shapes, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.length = shard_length(shapes, self.ranks)
        self.momentum = torch.zeros(self.length, device=devices.device())
        self.whole = torch.zeros(self.ranks * self.length, device=devices.device())

    def draw(self, step: int) -> list[torch.Tensor]:
        """This rank's flat gradient of each micro-batch, which `whole` and `everyone` know now."""
        used = sum(map(math.prod, self.shapes))
        generator = torch.Generator().manual_seed(step)
        # (ranks, micro-batches, elements): every rank draws those of all, and knows the mean.
        drawn = torch.randn(self.ranks, MICRO_BATCHES, len(self.whole), generator=generator)
        drawn[..., used:] = 0  # padding
        self.everyone, self.before = drawn.to(devices.device()), self.whole
        # The sum over micro-batches, the mean over ranks.
        self.whole = BETA * self.whole + self.everyone.sum(1).mean(0)
        return list(self.everyone[self.rank])

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a flat tensor."""
        return whole[self.rank * self.length:][:self.length]

    def orthogonalised(self, flat: torch.Tensor) -> torch.Tensor:
        """Newton-Schulz of each matrix of a flat tensor, flat again."""
        parts = flat.split([math.prod(shape) for shape in self.shapes] + [
            len(flat) - sum(map(math.prod, self.shapes))])
        # Not strict: the last part is the padding, which has no shape.
        done = [newton_schulz(part.view(shape)).flatten()
                for part, shape in zip(parts, self.shapes, strict=False)]
        return torch.cat([*done, torch.zeros_like(parts[-1])])

    def own_only(self, flat: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
        """The flat tensor with `elsewhere` outside of this rank's shard."""
        mixed = elsewhere.clone()
        self.shard(mixed).copy_(self.shard(flat))
        return mixed

    def causes(self) -> list[tuple[str, str, torch.Tensor, str]]:
        """(code, what an update may be instead, its value, a hint)."""
        mean, zeros = self.everyone.sum(1).mean(0), torch.zeros_like(self.whole)
        local = BETA * self.before + self.everyone[self.rank].sum(0)
        each = [self.orthogonalised(BETA * self.before + part.mean(0))
                for part in self.everyone.unbind(1)]
        alone = [self.orthogonalised(part.mean(0)) for part in self.everyone.unbind(1)]
        per_batch = "Newton-Schulz is not linear: once per step, on the sum of the micro-batches."
        whole = "Get the other pieces of a matrix from the ranks in `pieces` first."
        return [("not_orthogonalised", "the momentum itself, not orthogonalised", self.whole,
                 ""),
                ("not_gathered", "computed from this rank's own elements, with zeros for the rest "
                 "of the matrix", self.orthogonalised(self.own_only(self.whole, zeros)), whole),
                ("partly_reduced", "computed from a partly reduced matrix: the rest is this rank's "
                 "own gradient", self.orthogonalised(self.own_only(self.whole, local)), whole),
                ("not_reduced", "computed from this rank's own gradients alone",
                 self.orthogonalised(local), ""),
                ("without_momentum", "computed from the gradient, without momentum",
                 self.orthogonalised(mean),
                 "Orthogonalise the momentum."),
                *(("one_update_a_micro_batch", f"a {called} of one update for each micro-batch",
                   sum(updates) / count, per_batch)
                  for called, count in (("sum", 1), ("mean", MICRO_BATCHES))
                  for updates in (each, alone))]


def _judge_step(update, run, kept, forgotten, step):
    where = f"{_who(run)}, step {step}"
    kept.judge()
    if forgotten:
        raise Wrong(f"{where}: it does not wait for its {forgotten[0].kind} of "
                    f"{forgotten[0].bytes:,} bytes", "wait() for each work of a batch.",
                    code="never_waited")
    _judge_momentum(run, where)
    if not isinstance(update, torch.Tensor) or update.shape != run.momentum.shape:
        raise Wrong(f"{where}: muon_update returned {kind_of(update)}, not a shard of "
                    f"{run.length} elements", "It updates what this rank owns.", code="wrong_type")
    # The invariant: the update is a function of whole matrices, so each shard of it is a piece of
    # Newton-Schulz of the whole momentum, wherever the shards are cut (DeepSpeed issues 7807 and
    # 8443 had partly reduced matrices, and one update for each micro-batch).
    want = run.shard(run.orthogonalised(run.whole))
    require_dtype(update, want, f"{where}: the update")
    if _close(update, want):
        return
    name, place = _worst_matrix(run, update, want)
    if name is None:
        raise Wrong(f"{where}: the update of the padding is not 0",
                    "Begin with zeros: no matrix has the padding.", code="padding_updated")
    for code, what, whole, hint in run.causes():
        # by the matrix that is most wrong: the others may be right
        if _close(update[place], run.shard(whole)[place]):
            raise Wrong(f"{where}: the update of {name} is {what}", hint, code=code)
    raise Wrong(f"{where}: the update of {name} is not this rank's piece of the full matrix's "
                "update", "Newton-Schulz of the full matrix, and of the result the piece that "
                          "this rank owns; padding stays 0.", code="wrong_update")


def _judge_momentum(run, where):
    want = run.shard(run.whole)
    if _close(run.momentum, want):
        return
    mean, before = run.everyone.sum(1).mean(0), run.before
    causes = [
        ("not_updated", "not changed", before),
        ("sum_not_mean", "updated with the sum over ranks, not the mean",
         BETA * before + run.ranks * mean),
        ("not_reduced", "updated with this rank's own gradient",
         BETA * before + run.everyone[run.rank].sum(0)),
        ("mean_not_sum", "updated with the mean of the micro-batches, not their sum",
         BETA * before + mean / MICRO_BATCHES),
        ("beta_missing", "updated without multiplying it by 0.95", before + mean),
        ("one_micro_batch", "updated with the last micro-batch alone",
         BETA * before + run.everyone[:, -1].mean(0)),
        ("one_micro_batch", "updated with the first micro-batch alone",
         BETA * before + run.everyone[:, 0].mean(0)),
        ("beta_too_often", "multiplied by beta once for each micro-batch", _beta_per_batch(run)),
        ("without_momentum", "the gradient alone, without what it was before", mean)]
    code, found = next(((code, f"; it is {what}") for code, what, whole in causes
                        if _close(run.momentum, run.shard(whole))), ("wrong_momentum", ""))
    raise Wrong(f"{where}: momentum is not beta · momentum + the mean gradient{found}",
                "In place, once per step: the sum of the micro-batches, the mean over ranks.",
                code=code)


def _beta_per_batch(run):
    momentum = run.before
    for part in run.everyone.unbind(1):
        momentum = BETA * momentum + part.mean(0)
    return momentum


def _worst_matrix(run, update, want) -> tuple[str | None, slice]:
    """The name of the matrix with the largest error, None where that is in the padding; and where
    it lies in this rank's shard."""
    def error(place):
        # nan counts as the largest; there may be no padding
        return (update[place] - want[place]).abs().nan_to_num(math.inf).sum().item()

    found, end = [], 0
    for number, pieces in enumerate(pieces_of(run.shapes, run.ranks)):
        if run.rank in pieces:
            place = pieces[run.rank].in_shard
            end = place.stop
            on = f"on ranks {sorted(pieces)}" if len(pieces) > 1 else "on this rank alone"
            rows, columns = run.shapes[number]
            found.append((error(place), f"matrix {number} ({rows} × {columns}, {on})", place))
    padding = slice(end, run.length)
    found.append((error(padding), None, padding))
    return max(found, key=lambda one: one[0])[1:]


def _judge_traffic(calls):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Bytes of all gradients in fp32, Ψ elements.
    size = 4 * ranks * shard_length(COUNTED, ranks)
    reduced = sum(passes(call.kind) * call.bytes for call in calls if call.kind in _REDUCING)
    # One reduce-scatter; one for each micro-batch, or an all-reduce, moves twice as much.
    if reduced > size:
        raise Wrong(f"rank {rank} of {ranks} moves {reduced / size:.3g}Ψ elements in sums over "
                    "ranks; one reduce-scatter of the gradients is 1Ψ",
                    "Sum the micro-batches first, then one reduce-scatter.", code="wrong_traffic")
    crossing = [pieces for pieces in pieces_of(COUNTED, ranks)
                if rank in pieces and len(pieces) > 1]
    # Bytes: for each other rank of the matrix at most one whole matrix of fp32 numbers.
    most = 4 * sum((len(pieces) - 1) * math.prod(COUNTED[0]) for pieces in crossing)
    sent = sum(call.bytes * (1 if call.kind == "send" else (ranks - 1) / ranks)
               for call in calls if call.kind not in (*_REDUCING, "recv", "barrier"))
    # A matrix that lies on one rank must not be sent.
    if sent > most:
        raise Wrong(f"rank {rank} of {ranks} sends {sent:,.0f} bytes of momentum; it has a piece "
                    f"of {len(crossing)} matrices on a boundary, which need at most {most:,}",
                    "Only the ranks that own a piece of a matrix exchange it: a matrix that is "
                    "complete on its rank stays there.", code="wrong_traffic")


def _who(run) -> str:
    return f"rank {dist.get_rank()}, {run.ranks} ranks"


def _close(got, want) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=NEWTON_SCHULZ * max(
        1.0, want.abs().max().item() if want.numel() else 1.0))


_RANKS, _LAYERS, _CONTEXT, _BATCH = 4, 3, 64, 4


@shows("Muon on shards that are cut anywhere")
def show_sharded_muon() -> Picture:
    """Draws how far Muon's update of the matrices of a small Llama is off, if each of 4 ranks
    computes it from its own elements, and if it has the rest only from its own samples."""
    names, by_rank = _gradients()
    mean = {name: torch.stack([one[name] for one in by_rank]).mean(0) for name in names}
    shapes = [tuple(mean[name].shape) for name in names]
    layout = dict(zip(names, pieces_of(shapes, _RANKS), strict=True))
    alone = {name: _error(mean[name], layout[name], lambda _, m=mean[name]: torch.zeros_like(m))
             for name in names}
    partly = {name: _error(mean[name], layout[name], lambda rank, n=name: by_rank[rank][n])
              for name in names}
    cut = [name for name in names if len(layout[name]) > 1]
    others = [name for name in names if len(layout[name]) == 1]
    labels = [f"{len(others)} others, each on one rank"] + [
        f"{name}, on ranks {min(layout[name])} and {max(layout[name])}" for name in cut]
    share = sum(mean[name].numel() for name in cut) / sum(m.numel() for m in mean.values())
    note = (f"{len(names)} matrices, shards of {shard_length(shapes, _RANKS):,} elements.\nThe "
            f"{len(cut)} on a boundary have {share:.0%} of the elements: only these are sent.")
    colour = palette.MEMORY["optimizer state"]
    panels = [Panel(title, "% off, of the update's norm", [max(errors[name] for name in others),
                                                      *(errors[name] for name in cut)],
                    colour=colour)
              for title, errors in (("from the rank's own elements", alone),
                                    ("from a partly reduced matrix", partly))]
    return side_by_side(labels, panels, note)


def _gradients() -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Names of the matrices of a small Llama's layers, and by rank their gradients on samples of
    its own."""
    model, found = models.llama(layers=_LAYERS, hidden=64, context=_CONTEXT), []
    for batch in data.lm_batches(_RANKS, _BATCH, _CONTEXT):
        model.zero_grad()
        model(**batch).loss.backward()
        found.append({_short(name): p.grad.clone()
                      for name, p in models.blocks(model).named_parameters() if p.dim() == 2})
    return list(found[0]), found


def _short(name) -> str:
    """"0.mlp.up_proj.weight" as "layer 0 up_proj"."""
    layer, *_, matrix, _ = name.split(".")
    return f"layer {layer} {matrix}"


def _error(reduced, pieces, rest) -> float:
    """Percent of the norm by which an update is off that each rank computes from its own piece of
    the reduced matrix and from rest(rank) elsewhere, and of which it keeps its own piece."""
    whole = newton_schulz(reduced)
    built = torch.empty_like(whole).flatten()
    for rank, piece in pieces.items():
        mixed = rest(rank).flatten().clone()
        mixed[piece.in_matrix] = reduced.flatten()[piece.in_matrix]
        built[piece.in_matrix] = newton_schulz(mixed.view_as(whole)).flatten()[piece.in_matrix]
    return 100 * ((built.view_as(whole) - whole).norm() / whole.norm()).item()
