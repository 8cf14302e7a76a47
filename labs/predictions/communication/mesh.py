"""Ranks in a mesh of several dimensions: who is where, who forms a group, what leaves a node.

The last dimension is the fastest, as in torch's `init_device_mesh`: in a mesh of data × pipeline ×
tensor the ranks of a tensor-parallel group are neighbours. Source: Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", SC 2021 (arXiv 2104.04473), section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Mesh:
    """names and sizes of the dimensions, the slowest first; gpus_per_node: ranks of one node.

    Raises ValueError where there are not as many names as sizes, or a size is below 1.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    gpus_per_node: int = 8

    def __post_init__(self):
        if len(self.names) != len(self.sizes):
            raise ValueError(f"{len(self.names)} names for {len(self.sizes)} sizes")
        for name, size in (*zip(self.names, self.sizes, strict=True),
                           ("gpus_per_node", self.gpus_per_node)):
            if size < 1:
                raise ValueError(f"{name}={size}: at least 1 is needed")

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has: the product of its sizes."""
        return prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The rank's place in each dimension. Raises ValueError where there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"no rank {rank}: the mesh has ranks 0 to {self.ranks - 1}")
        found = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            found.insert(0, place)
        return tuple(found)

    def rank(self, coordinates: Sequence[int]) -> int:
        """The rank at these places, one for each dimension."""
        found = 0
        for place, size in zip(coordinates, self.sizes, strict=True):
            found = found * size + place
        return found

    def group(self, rank: int, name: str) -> list[int]:
        """The ranks that differ from `rank` at most in this dimension, in order."""
        dimension, own = self.names.index(name), self.coordinates(rank)
        return [self.rank((*own[:dimension], place, *own[dimension + 1:]))
                for place in range(self.sizes[dimension])]

    def groups(self, name: str) -> list[list[int]]:
        """All groups of a dimension; each rank is in one of them."""
        others = [range(1) if each == name else range(size)
                  for each, size in zip(self.names, self.sizes, strict=True)]
        return [self.group(self.rank(corner), name) for corner in product(*others)]

    def nodes(self, group: Sequence[int]) -> list[int]:
        """The nodes that the ranks of a group are on, each once, in order."""
        return sorted({rank // self.gpus_per_node for rank in group})

    def crosses_nodes(self, name: str) -> bool:
        """Whether some group of this dimension has ranks on more than one node."""
        return any(len(self.nodes(group)) > 1 for group in self.groups(name))
