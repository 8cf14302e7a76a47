"""Puts together what the ranks of a tensor-parallel group hold, by comparing shapes with those of
the full model: how a module is sharded may differ between answers."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labs.checks.on_ranks import largest_difference, raise_on_all_ranks
from labs.checks.reference import Tensors
from labs.checks.tolerances import UNCHANGED
from labs.checks.verdicts import Wrong

_HINT_NAME = ("Put what replaces a layer where the layer was, under the same name: "
              "setattr(attention, 'q_proj', ...). Its parameters are called weight and bias.")
_HINT_SHAPE = ("Rank r of t holds the r-th of t equal parts of one dimension: of the rows of a "
               "column-parallel layer's weight, of the columns of a row-parallel one's.")


class ShardReader:
    """On a rank: reads the parameters of `module`, unsharded, by the names that they have in
    `model`, which has not been cut. A call is a collective: all ranks of `group` make it, or none.

    A parameter is replicated where its local shape is the full one, and a shard where one
    dimension differs and the ranks' sizes of it add up to the full size: equal ones, unequal ones,
    or ones with padding at the end. A DTensor is asked for its full tensor. Raises Wrong, on all
    ranks, where a parameter is missing or has another shape.

    Which rank holds which of equal parts is a convention: `require_start` finds it.

    After construction, sharded and replicated: the names of each.
    """

    def __init__(self, module: nn.Module, model: nn.Module, group: dist.ProcessGroup | None = None):
        self.group = group or dist.group.WORLD
        self._wholes = {name: p.shape for name, p in model.named_parameters()}
        self._names = raise_on_all_ranks(_matched, list(self._wholes),
                                         [name for name, _ in module.named_parameters()])
        by_rank = [None] * dist.get_world_size(self.group)
        shapes = {name: tuple(p.shape) for name, p in self.local(module).items()}
        # Shapes of all ranks tell a shard from a replicated parameter; the student's module says
        # nothing of it. Pickled, because the ranks may differ in them.
        dist.all_gather_object(by_rank, shapes, group=self.group)
        self._cuts = raise_on_all_ranks(_cuts, self._wholes, by_rank)  # name -> (dimension, sizes)
        self._orders = {}  # name -> the rank of each part; a name is absent where it is as the part
        # A DTensor's shape is the global one, so its local shape has to be looked at.
        self.sharded = [name for name, p in self.local(module).items()
                        if name in self._cuts
                        or isinstance(p, DTensor) and p.to_local().shape != p.shape]
        self.replicated = [name for name in self._wholes if name not in self.sharded]

    def local(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Name in `model` -> the module's own parameter, on this rank."""
        own = dict(module.named_parameters())
        return {name: own[found] for name, found in self._names.items()}

    def cut(self, name: str) -> tuple[int | None, list[int]]:
        """(dimension along which a parameter is divided, its size on each rank); (None, []) of a
        replicated one."""
        return self._cuts.get(name, (None, []))

    def __call__(self, module: nn.Module) -> Tensors:
        """Name -> unsharded parameter."""
        return self.gather({name: p.detach() for name, p in self.local(module).items()})

    def gather(self, tensors: Tensors) -> Tensors:
        """The full tensors that are cut as the parameters of these names are; a replicated one
        is this rank's own."""
        # full_tensor() is a collective, too: all ranks call it in the same order of names.
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t
                 for name, t in tensors.items()}
        shards = {name: self._padded(name, t) for name, t in whole.items()
                  if name in self._cuts and not isinstance(tensors[name], DTensor)}
        # One all-gather for all shards of a dtype: a check has hundreds of small ones.
        for dtype in {t.dtype for t in shards.values()}:
            alike = {name: t for name, t in shards.items() if t.dtype == dtype}
            mine = torch.cat([t.flatten() for t in alike.values()])
            by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(by_rank, mine, group=self.group)
            of_ranks = [flat.split([t.numel() for t in alike.values()]) for flat in by_rank]
            for number, (name, t) in enumerate(alike.items()):
                whole[name] = self._joined(name, [of[number].view(t.shape) for of in of_ranks])
        return whole

    def _padded(self, name, tensor):
        """A shard with the size of the largest: collectives need equal ones."""
        dimension, sizes = self._cuts[name]
        shape = list(tensor.shape)
        shape[dimension] = max(sizes)
        padded = tensor.new_zeros(shape)
        padded.narrow(dimension, 0, tensor.shape[dimension]).copy_(tensor)
        return padded

    def _joined(self, name, pieces):
        dimension, sizes = self._cuts[name]
        if name in self._orders:  # of equal parts
            pieces = [pieces[rank] for rank in self._orders[name]]
        whole = torch.cat([piece.narrow(dimension, 0, size)
                           for piece, size in zip(pieces, sizes, strict=True)], dimension)
        # Without the padding that the last shard may have.
        return whole.narrow(dimension, 0, self._wholes[name][dimension])

    def _parts(self, own, whole, dimension, sizes) -> list[int]:
        """The equal parts of the unsharded parameter that this rank's own numbers are."""
        if len(set(sizes)) > 1 or sum(sizes) != whole.shape[dimension]:
            return []
        pieces = whole.detach().split(sizes[0], dimension)
        return [number for number, piece in enumerate(pieces)
                if largest_difference(own.detach(), piece) <= UNCHANGED]

    def require_start(self, module: nn.Module, model: nn.Module) -> None:
        """Raises Wrong unless the ranks' shards, put together, are the parameters of `model`. Both
        have not been trained yet. Rank r may hold another than the r-th part, as long as each part
        is on one rank; later calls put them together in the same order."""
        parts = {name: self._parts(p, model.get_parameter(name), *self._cuts[name])
                 for name, p in self.local(module).items() if name in self._cuts}
        by_rank = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(by_rank, parts, group=self.group)
        for name in parts:
            # None where several parts have equal numbers, as a bias of zeros does: then the order
            # cannot be told from the numbers.
            held = [found[name][0] if len(found[name]) == 1 else None for found in by_rank]
            # Only a permutation: with the same part on two ranks, `_judge_start` rejects it below.
            if None not in held and sorted(held) == list(range(len(held))):
                self._orders[name] = [held.index(part) for part in range(len(held))]
        for name in parts:  # a bias may begin with equal numbers, and lies as its weight does
            weight = name.removesuffix("bias") + "weight"
            if name not in self._orders and weight in self._orders:
                self._orders[name] = self._orders[weight]
        # Outside of the judgement: it communicates, and all ranks have to take part.
        found = self(module)
        raise_on_all_ranks(_judge_start, found, model, self._cuts, self.group)

    def out_of_order(self) -> Wrong | None:
        """What to say of the first parameter whose parts are not in the order of the ranks, where
        what was trained with it differs: its place may be taken for another one."""
        for name, ranks in self._orders.items():
            part = next((part for part, rank in enumerate(ranks) if part != rank), None)
            if part is not None:
                return Wrong(f"parameter {name!r}: rank {ranks[part]} has part {part} of "
                             f"{len(ranks)}, and what is computed with it is not the model's",
                             _HINT_SHAPE, code="wrong_part")
        return None


def _matched(wanted, found) -> dict[str, str]:
    """Name in the model -> name in the module, where wrappers may have added parts to it, as
    `o_proj.linear.weight` has. Without one the parameters cannot be compared."""
    matched = {}
    for name in wanted:
        alike = [other for other in found if _contains(other.split("."), name.split("."))]
        if not alike:
            raise Wrong(f"rank {dist.get_rank()}: the module has no parameter for {name!r}",
                        _HINT_NAME, code="missing_parameter")
        matched[name] = min(alike, key=len)
    return matched


def _contains(parts: list[str], wanted: list[str]) -> bool:
    """Whether `wanted` are among `parts`, in order, with the same end."""
    rest = iter(parts)
    return parts[-1] == wanted[-1] and all(part in rest for part in wanted)


def _cuts(wholes, by_rank) -> dict[str, tuple[int, list[int]]]:
    """Name -> (dimension, its size on each rank) of the parameters that are cut."""
    cuts = {}
    for name, whole in wholes.items():
        shapes = [shapes[name] for shapes in by_rank]
        if all(shape == tuple(whole) for shape in shapes):
            continue
        dimension = _dimension(tuple(whole), shapes)
        if dimension is None:
            raise _no_division(name, tuple(whole), shapes)
        cuts[name] = dimension, [shape[dimension] for shape in shapes]
    return cuts


def _no_division(name, whole, shapes) -> Wrong:
    listed, world = ", ".join(str(list(shape)) for shape in shapes), dist.get_world_size()
    for_all = world > len(shapes) and _dimension(whole, [shapes[0]] * world) is not None
    return Wrong(f"rank {dist.get_rank()}, parameter {name!r}: on the {len(shapes)} ranks of the "
                 f"group its shapes are {listed}, which do not make up the model's {list(whole)}"
                 + f"; it is sharded over all {world} ranks" * for_all,
                 "Pass `group` on to whatever asks for a rank or for the number of ranks."
                 if for_all else _HINT_SHAPE, code="wrong_shape")


def _dimension(whole, shapes) -> int | None:
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    unlike = {d for shape in shapes for d in range(len(whole)) if shape[d] != whole[d]}
    if len(unlike) != 1:
        return None
    dimension = unlike.pop()
    sizes = [shape[dimension] for shape in shapes]
    # padded at the end: equal sizes, and less padding than one row for each rank
    fits = sum(sizes) == whole[dimension] or (
        len(set(sizes)) == 1 and 0 < sum(sizes) - whole[dimension] < len(sizes))
    return dimension if fits else None


def _judge_start(found, model, cuts, group):
    # A wrong cut shows here, before its consequences do: heads dealt out in turn, the first part
    # on every rank, weights drawn again.
    for name, want in model.named_parameters():
        if largest_difference(found[name], want.detach()) > UNCHANGED:
            code, what = _wrong_cut(found[name], want.detach(), cuts.get(name))
            raise Wrong(f"rank {dist.get_rank(group)}, parameter {name!r} before the first step: "
                        f"{what}", _HINT_SHAPE, code=code)


def _wrong_cut(got, want, cut) -> tuple[str, str]:
    """(code, what is wrong)."""
    if cut is None:
        return "wrong_initial_value", "its numbers are not those of the model"
    dimension, sizes = cut
    pieces, wanted = (list(tensor.split(sizes[0], dimension)) for tensor in (got, want))
    same: Callable = lambda a, b: a.shape == b.shape and torch.equal(a, b)  # noqa: E731
    if all(same(piece, pieces[0]) for piece in pieces):
        return "same_part", "every rank holds the same part"
    if all(same(piece, want.narrow(dimension, rank, want.shape[dimension] - rank)
                .index_select(dimension, torch.arange(0, want.shape[dimension] - rank, len(sizes),
                                                      device=want.device)))
           for rank, piece in enumerate(pieces)):
        return "dealt_out", ("its rows were dealt out in turn, so that every head is split among "
                             "the ranks")
    wrong = next((rank for rank, pair in enumerate(zip(pieces, wanted, strict=False))
                  if not same(*pair)), 0)
    return "wrong_part", (f"the part of rank {wrong} is not part {wrong} of {len(sizes)} of the "
                          f"model's {'rows' if dimension == 0 else 'columns'}")
