"""Exercise 8.10: a flipped bit in one replica is found by digests, and its rank named."""

import builtins
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labs.checks.numbers import as_list, require_signature
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of
from labs.faults.flipped_bit import flip_bit
from labs.meters.traffic import Traffic
from labs.surviving_failure.scaffold import tensor_bytes
from labs.workers import devices

BYTES = 400  # that a rank may send of each tensor: a name and a digest, also pickled
RANKS = 6
# Groups of one to five ranks, in which all ranks call at once.
PARTS = (([0, 1], [2, 3, 4, 5]), ([0, 1, 2], [3, 4, 5]), ([0], [1, 2, 3, 4, 5]))
_RULE = ("{name: [the ranks whose tensor is not as that of more than half of the ranks]}, with an "
         "empty list where no more than half agree, and without the tensors that are equal.")


@dataclass(frozen=True)
class Flip:
    """One flipped bit: of an element of a tensor, on a rank of the group."""

    name: str
    index: int
    bit: int
    rank: int

    def __str__(self):
        return f"bit {self.bit} of {self.name!r} flipped on rank {{ranks[{self.rank}]}}"


@dataclass(frozen=True)
class Case:
    """What is flipped, and what a wrong answer to it has forgotten."""

    flips: tuple[Flip, ...]
    hint: str = ""

    def what(self, members: list[int]) -> str:
        """The case in words. members: the numbers of the group's ranks."""
        flips = " and ".join(str(flip).format(ranks=members) for flip in self.flips)
        return f"ranks {members}, {flips or 'equal replicas'}"

    def expected(self, members: list[int]) -> dict[str, list[int]]:
        """What find_corrupt returns."""
        found = {}
        for name in dict.fromkeys(flip.name for flip in self.flips):
            corrupt: dict[int, set] = {}
            for flip in self.flips:
                if flip.name == name:
                    corrupt.setdefault(flip.rank, set()).add((flip.index, flip.bit))
            # Two ranks with the same flips of a tensor have equal digests.
            alike = [sum(corrupt.get(one) == corrupt.get(other) for other in range(len(members)))
                     for one in range(len(members))]
            most = max(alike)
            found[name] = [member for member, count in zip(members, alike, strict=True)
                           if count < most] if 2 * most > len(members) else []
        return found


class Replica(nn.Module):
    """Tensors of many kinds, equal on all ranks: some hold NaN, 0.0 and -0.0."""

    def __init__(self):
        super().__init__()
        # The same seed on every rank: replicas are equal without a broadcast.
        torch.manual_seed(8)
        self.weight = nn.Parameter(torch.randn(300, 300) * 0.02)
        self.bias = nn.Parameter(torch.randn(7))
        self.short = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("steps", torch.tensor(12))
        self.register_buffer("angles", torch.randn(8), persistent=False)
        with torch.no_grad():
            self.bias[:3] = torch.tensor([torch.nan, 0.0, -0.0])
        self.to(devices.device())


@check("8.10")
def check_find_corrupt(find_corrupt: Callable):
    """find_corrupt(module, group) -> {name: ranks}, on every rank of the group."""
    require_signature(find_corrupt, ("module", "group"))
    on_ranks(_judge_all, find_corrupt, world_sizes=(RANKS,))
    return (f"one flipped bit is found in {len(list(_single(RANKS)))} places of 9 tensors, among 2 "
            "to 6 ranks, and its rank named where more than half agree; between replicas of "
            "shards, too")


def _single(ranks) -> Iterator[Case]:
    """One flipped bit: the highest of a mantissa first, which any comparison sees."""
    last = ranks - 1
    yield Case((Flip("weight", 89_999, 22, last),))
    yield Case((Flip("weight", 0, 22, 0),), "Rank 0 may be the one: what do most ranks have?")
    yield Case((Flip("weight", 45_000, 0, last),), "A mean, a norm or a tolerance hides the lowest "
               "bit. A digest of the bits does not.")
    yield Case((Flip("bias", 5, 12, last),), "Every tensor has a digest of its own.")
    yield Case((Flip("bias", 1, 31, last),), "0.0 == -0.0, but their bits differ: "
               "lab.tensor_bytes.")
    yield Case((Flip("bias", 0, 3, last),), "NaN is never equal to NaN, and there are many: "
               "compare bits.")
    yield Case((Flip("short", 14, 0, 0),))
    yield Case((Flip("scale", 0, 10, last),))
    yield Case((Flip("transposed", 3, 1, last),))
    yield Case((Flip("frozen", 8, 5, last),), "Forward uses a frozen parameter as it does others.")
    yield Case((Flip("mean", 2, 7, last),), "A module has buffers as well: module.named_buffers().")
    yield Case((Flip("steps", 0, 40, 0),), "A buffer may hold whole numbers.")
    yield Case((Flip("angles", 6, 9, last),), "state_dict() leaves out buffers that are not saved: "
               "module.named_buffers() has them all.")


def _several(ranks) -> list[Case]:
    """No flip, two of them, and such that no majority is left."""
    last, flip = ranks - 1, Flip("weight", 7, 20, 0)
    found = [Case((), "Equal bits have equal digests on all ranks, NaN included.")]
    if ranks == 1:
        return found
    found.append(Case((Flip("weight", 7, 20, last), Flip("weight", 9, 3, last)),
                      "Several bits of one tensor."))
    if ranks > 2:
        found.append(Case((flip, Flip("mean", 1, 4, last)), "Each tensor has its own majority."))
    if ranks == 4:
        found.append(Case((flip, Flip("weight", 7, 20, 1)),
                          "Two against two: nobody can say which ones are right."))
    if ranks == 5:
        found.append(Case((flip, Flip("weight", 8, 20, 3)), "Several ranks may differ."))
        found.append(Case((flip, Flip("weight", 7, 20, 3)), "Several ranks may differ."))
    return found


def _judge_all(find_corrupt):
    """On a rank: all cases in the whole group, some in groups of other sizes, then shards."""
    ranks = dist.get_world_size()
    for case in [Case((), "Equal bits have equal digests on all ranks, NaN included."),
                 *_single(ranks)]:
        raise_on_all_ranks(_judge, find_corrupt, Replica(), dist.group.WORLD, case)
    for parts in PARTS:
        groups = [dist.new_group(part) for part in parts]
        # Ranks of a group are numbered from 0 in it, but find_corrupt returns their global numbers.
        mine = next(at for at, part in enumerate(parts) if dist.get_rank() in part)
        # every rank calls it equally often
        for cases in zip_longest(*(_several(len(part)) for part in parts), fillvalue=Case(())):
            raise_on_all_ranks(_judge, find_corrupt, Replica(), groups[mine], cases[mine])
    _judge_shards(find_corrupt)


def _judge_shards(find_corrupt):
    """On a rank of three replicas of two shards each."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(devices.device().type, (3, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(8)
    group, column = mesh["replicate"].get_group(), mesh.get_coordinate()[1]
    for flips in ((), (Flip("0.weight", 11, 21, 1),)):
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(devices.device())
        fully_shard(module, mesh=mesh)
        case = Case(flips if column == 1 else (), "A rank has a shard: compare it with the same "
                    "shard of the other replicas, which are the ranks of `group`; "
                    "lab.tensor_bytes has this rank's part.")
        raise_on_all_ranks(_judge, find_corrupt, module, group, case, "HSDP, ")


def _judge(find_corrupt, module, group, case, layout=""):
    members, rank = dist.get_process_group_ranks(group), dist.get_rank()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for flip in case.flips:
        if members[flip.rank] == rank:
            flip_bit(tensors[flip.name], flip.index, flip.bit)
    before = {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
    salted = mock.patch.object(builtins, "hash", _Salted(rank))
    with Traffic() as traffic, salted:
        returned = find_corrupt(module, group)
    what = layout + case.what(members)
    # Invariant: only the ranks of the group are there; in a job the others do not call.
    for call in traffic.calls:
        if call.members and not set(call.members) <= set(members):
            raise Wrong(f"{what}: find_corrupt calls {call.kind} on ranks {list(call.members)}",
                        "Give each collective group=group.", code="wrong_group")
    found, want = _lists(returned, f"{what}: find_corrupt on rank {rank}"), case.expected(members)
    # Invariant: every rank of the group returns the same answer, and it is the expected one.
    # Catches digests that are compared with those of rank 0 only, and a tolerance.
    if found != want:
        _refuse(found, want, tensors, f"{what}: find_corrupt on rank {rank}", case, members)
    # Invariant: it finds, and repairs nothing; a majority may be a coincidence.
    if changed := [name for name in tensors if tensor_bytes(tensors[name]) != before[name]]:
        raise Wrong(f"{what}: find_corrupt changed {changed[0]!r} on rank {rank}",
                    "It only says what differs.", code="changes_input")
    # Invariant: digests are communicated, not the tensors: a check after every few steps must cost
    # less than a step.
    limit = BYTES * len(tensors) * len(members)
    if traffic.bytes > limit:
        model = sum(len(each) for each in before.values())
        raise Wrong(f"{what}: its collectives move {traffic.bytes:,} bytes on rank {rank}; a name "
                    f"and a digest of {len(tensors)} tensors of {len(members)} ranks are at most "
                    f"{limit:,}, the tensors of one rank {model:,}",
                    "Gather digests, not tensors: hashlib.sha256(data).hexdigest() has 64 letters.",
                    code="wrong_traffic")


class _Salted:
    """hash() as it is where each rank was started by itself: Python salts that of texts and bytes
    in each process, and that of an object is its address. Ranks of `launch` share the salt,
    because they are forked from one process."""

    def __init__(self, rank, original=builtins.hash):
        self._rank, self._original = rank, original

    def __call__(self, value):
        is_number = isinstance(value, int | float | complex)
        return self._original(value) ^ (0 if is_number else 0x9E3779B97F4A7C15 * (self._rank + 1)
                                        & (1 << 61) - 1)


def _lists(returned, what) -> dict[str, list[int]]:
    if not isinstance(returned, Mapping):
        raise Wrong(f"{what} returned {kind_of(returned)}, not a dictionary", _RULE,
                    code="wrong_type")
    found = {}
    for name, ranks in returned.items():
        ranks = sorted(ranks) if isinstance(ranks, set | frozenset) else as_list(ranks)
        if ranks is None or not all(isinstance(rank, int) for rank in ranks):
            raise Wrong(f"{what} returned {kind_of(returned[name])} for {name!r}, not a list of "
                        "ranks", _RULE, code="wrong_type")
        found[name] = sorted(ranks)
    return found


def _refuse(found, want, tensors, what, case, members):
    said = f"{what} returned {found}"
    if unknown := [name for name in found if name not in tensors]:
        raise Wrong(f"{said}: no tensor has the name {unknown[0]!r}", "The names of "
                    "module.named_parameters() and module.named_buffers().", code="unknown_name")
    if wrongly := [name for name in found if name not in want]:
        raise Wrong(f"{said}: {wrongly[0]!r} has the same bits on all ranks",
                    "Is a digest the same in every process, and only of the bits? Python's hash() "
                    "is not: each process has another salt." if not case.flips else _RULE,
                    code="extra_entry")
    if missed := [name for name in want if name not in found]:
        raise Wrong(f"{said}: {missed[0]!r} differs, and is not found", case.hint or
                    "All ranks need the digests of all: dist.all_gather_object(found, own, "
                    "group=group).", code="missing_entry")
    name = next(name for name in want if found[name] != want[name])
    if not want[name]:
        raise Wrong(f"{said}: which rank is wrong, nobody can say: no more than half of the ranks "
                    f"have the same {name!r}", "Two ranks that differ are both suspects: return an "
                    "empty list.", code="undecidable")
    if not found[name]:
        raise Wrong(f"{said}: {name!r} is the same on more than half of the ranks; the others are "
                    f"{want[name]}", case.hint or _RULE, code="suspects_not_named")
    raise Wrong(f"{said}: {name!r} is corrupt on {want[name]}", case.hint or _RULE,
                code="wrong_ranks")
