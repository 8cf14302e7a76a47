"""A block of two matrix products under layouts that are given as PartitionSpecs: what each device
holds of each array, and which collectives the compiler has put in. Runs in JAX's process; other
processes import it too, so JAX is imported inside the functions only."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy

from labs.sharding_in_jax.scaffold import SHAPES, block_arrays, place_arrays

INNER = "h"  # the array between the products, whose layout follows from those of x and up
ARRAYS = ("x", "up", INNER, "down", "y")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_COLLECTIVE = re.compile(r"= (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|"
                         r"collective-permute)\(")
_TENSOR = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")

Index = tuple[tuple[int, int], ...]  # (first, end) along each dimension


@dataclass(frozen=True)
class Pieces:
    """What each device holds of an array. shape: of the full one. by_device: device -> its part."""

    shape: tuple[int, ...]
    by_device: dict[int, Index]

    def elements(self, device: int) -> int:
        """How many elements a device holds."""
        return math.prod(end - first for first, end in self.by_device[device])

    def bytes(self, device: int) -> int:
        """How many bytes a device holds; all arrays are float32."""
        return 4 * self.elements(device)

    def holders(self) -> dict[Index, list[int]]:
        """Part -> the devices that hold it."""
        found = {}
        for device, index in sorted(self.by_device.items()):
            found.setdefault(index, []).append(device)
        return found


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program. kind: all_reduce, all_gather, … bytes: logical, as
    `Traffic` counts them: of the output, all of its tensors together."""

    kind: str
    bytes: int


@dataclass
class MeasuredLayout:
    """What a layout has led to. pieces, types: of each array. difference: the largest one of loss
    and gradients to one device's, as a share of the largest number. refused: what JAX said instead
    of all this."""

    specs: dict[str, str]
    pieces: dict[str, Pieces] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    collectives: list[CompiledCollective] = field(default_factory=list)
    difference: float = math.nan
    refused: str = ""


@dataclass(frozen=True)
class Complaint:
    """Why an answer cannot be measured. code: as of a verdict."""

    code: str
    sentence: str
    hint: str = ""


def block_forward(x, up, down, out_sharding=None) -> tuple:
    """In JAX's process: (h, y) of the block. out_sharding: the PartitionSpec of y."""
    import jax

    h = jax.nn.relu(x @ up)
    return h, jax.numpy.matmul(h, down, out_sharding=out_sharding)


def collectives(compiled) -> list[CompiledCollective]:
    """In JAX's process: the collectives in the text of a program compiled for CPU devices. Those
    that XLA has combined are one, with the sum of their bytes."""
    return [CompiledCollective(kind.replace("-", "_"), sum(map(_bytes, _TENSOR.findall(result))))
            for result, kind in _COLLECTIVE.findall(compiled.as_text())]


def _bytes(tensor) -> int:
    dtype, shape = tensor
    return _BYTES.get(dtype, 4) * math.prod(int(size) for size in shape.split(",") if size)


def pieces(array) -> Pieces:
    """In JAX's process: which part of an array each device really holds."""
    return Pieces(array.shape, {shard.device.id: _index(shard.index, array.shape)
                                for shard in array.addressable_shards})


def _index(slices, shape) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def measure(layouts: Callable, mesh: dict[str, int]) -> dict[str, MeasuredLayout] | Complaint:
    """In JAX's process: each layout that `layouts()` returns, tried on a mesh with these axes."""
    import jax

    found = layouts()
    if complaint := _complaint(found):
        return complaint
    # Outside of the mesh: NumPy arrays, one device.
    expected = jax.value_and_grad(_loss, (0, 1, 2))(*block_arrays().values())
    with jax.set_mesh(jax.make_mesh(tuple(mesh.values()), tuple(mesh))):
        return {name: _measured(specs, expected) for name, specs in found.items()}


def _complaint(found) -> Complaint | None:
    from jax.sharding import PartitionSpec

    if not isinstance(found, dict):
        return Complaint("wrong_type", f"layouts() returned {_kind(found)}, not a dictionary with "
                         "a dictionary for each layout")
    for name, specs in found.items():
        if not isinstance(specs, dict):
            return Complaint("wrong_type",
                             f"{name} is {_kind(specs)}, not a dictionary: array -> PartitionSpec")
        if set(specs) != set(SHAPES):
            return Complaint("wrong_keys",
                             f"{name} names the arrays {', '.join(map(str, specs)) or '(none)'}; "
                             f"they are {', '.join(SHAPES)}")
        for array, spec in specs.items():
            if not isinstance(spec, PartitionSpec):
                return Complaint("wrong_type", f"{name}: {array} is {spec!r}, no PartitionSpec",
                                 'Write P("n") for "cut along the first dimension", and P() for '
                                 '"replicated on each device".')
            if len(spec) > len(SHAPES[array]):
                return Complaint("wrong_count",
                                 f"{name}: {array} has {len(SHAPES[array])} dimensions, and "
                                 f"{_spec_text(spec)} names {len(spec)}")
    return None


def _kind(found) -> str:
    return "nothing (None)" if found is None else f"a {type(found).__name__}"


def _loss(x, up, down, out_sharding=None):
    return (block_forward(x, up, down, out_sharding)[1] ** 2).mean()


def _measured(specs, expected) -> MeasuredLayout:
    import jax

    found = MeasuredLayout({name: _spec_text(spec) for name, spec in specs.items()})
    try:
        placed = place_arrays(specs)
        # Gradients of x, too: in a model x comes from the layer below. The PartitionSpec of y is
        # static, because it is no array.
        step = jax.jit(jax.value_and_grad(_loss, (0, 1, 2)), static_argnums=3)
        compiled = step.lower(*placed, specs["y"]).compile()
        # A second program, because the step returns loss and gradients only.
        h, y = jax.jit(block_forward, static_argnums=3)(*placed, specs["y"])
        result = compiled(*placed)
    except Exception as error:  # ShardingTypeError is of no public module
        found.refused = f"{type(error).__name__}: {error}"
        return found
    held = dict(zip(("x", "up", "down"), placed, strict=True)) | {INNER: h, "y": y}
    found.pieces = {name: pieces(held[name]) for name in ARRAYS}
    found.types = {name: str(jax.typeof(held[name])) for name in ARRAYS}
    found.collectives = collectives(compiled)
    found.difference = _difference(result, expected)
    return found


def _spec_text(spec) -> str:
    if spec.unreduced or spec.reduced:  # such a spec refuses to be iterated
        return repr(spec).replace("PartitionSpec", "P", 1)
    return f"P({', '.join(map(repr, spec))})"


def _difference(found, expected) -> float:
    """The largest difference of two trees of arrays, as a share of each array's largest number."""
    import jax

    def of(one, other):
        one, other = numpy.asarray(one), numpy.asarray(other)
        return float(abs(one - other).max() / abs(other).max())

    return max(jax.tree.leaves(jax.tree.map(of, found, expected)))
