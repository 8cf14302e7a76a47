"""Exercises 7.21 and 7.22: where a rank is in a mesh, who is in its group; a table's wrong row."""

import random
from collections.abc import Callable

from labs.exercises.numbers import as_list, as_number
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.pipeline_parallel.dimensions.published_meshes import LLAMA_3, MeshRow
from labs.predictions.mesh import Mesh
from labs.words import counted

# The slowest dimension first. Sizes of 1, primes and one, two and four dimensions are among them:
# an answer for 8 × 12 × 32 alone must not pass.
SIZES = ((32, 12, 8), (2, 2, 2), (2, 3), (5,), (1, 7, 1), (3, 1, 4, 2), (128, 1, 16, 8), (4, 6, 1))
TRIED = 40  # ranks of each mesh


@check("7.21")
def check_mesh(coordinates: Callable, group: Callable):
    """coordinates(rank, sizes) -> a place for each size; group(rank, dimension, sizes) -> ranks."""
    tried = 0
    for sizes in SIZES:
        mesh = Mesh(tuple(map(str, range(len(sizes)))), sizes)
        for rank in _ranks(mesh):
            _judge_coordinates(coordinates, rank, mesh)
            for dimension in range(len(sizes)):
                _judge_group(group, rank, dimension, mesh)
            tried += 1
    return (f"right for {tried} ranks of {len(SIZES)} meshes, of one dimension to four; in "
            "32 × 12 × 8 the 8 ranks of a tensor-parallel group are neighbours")


def _ranks(mesh) -> list[int]:
    if mesh.ranks <= TRIED:
        return list(range(mesh.ranks))
    drawn = random.Random(mesh.ranks).sample(range(1, mesh.ranks - 1), TRIED - 2)
    return [0, *drawn, mesh.ranks - 1]


def _judge_coordinates(coordinates, rank, mesh):
    returned = coordinates(rank, mesh.sizes)
    where = f"coordinates({rank}, {mesh.sizes})"
    got = _whole_numbers(returned, where, f"one place for each of {len(mesh.sizes)} dimensions")
    want = mesh.coordinates(rank)
    if got == want:
        return
    if len(got) != len(want):
        raise Wrong(f"{where} is {got}: {counted(len(got), 'place')} for "
                    f"{counted(len(want), 'dimension')}", code="wrong_count")
    # No two ranks may be in one place, and the last dimension is the one in which neighbours
    # differ: a mesh filled the other way round puts a tensor-parallel group on 8 nodes.
    turned = Mesh(mesh.names, mesh.sizes[::-1]).coordinates(rank)
    if got == turned[::-1]:
        raise Wrong(f"{where} is {got}, but it should be {want}: yours counts the first dimension "
                    "fastest", "Neighbours, such as ranks 0 and 1, differ in the last dimension.",
                    code="first_dimension_fastest")
    if got == turned:
        raise Wrong(f"{where} is {got}, but it should be {want}: the sizes are taken in the order "
                    "of the other end", code="other_end_first")
    if got == want[::-1]:
        raise Wrong(f"{where} is {got}, but it should be {want}: the right places in the reversed "
                    "order", "The first place belongs to the first size.", code="reversed_order")
    if got == tuple(place + 1 for place in want):
        raise Wrong(f"{where} is {got}, but it should be {want}: places count from 0",
                    code="counts_from_one")
    if any(place >= size for place, size in zip(got, mesh.sizes, strict=True)):
        raise Wrong(f"{where} is {got}: a place is a number from 0 to the size of its dimension, "
                    "less 1", code="outside_the_mesh")
    raise Wrong(f"{where} is {got}, but it should be {want}",
                "divmod(rank, last size) gives what is left for the other dimensions, and the last "
                "place.", code="wrong_value")


def _judge_group(group, rank, dimension, mesh):
    returned = group(rank, dimension, mesh.sizes)
    where = f"group({rank}, {dimension}, {mesh.sizes})"
    got, want = list(_whole_numbers(returned, where, "ranks")), mesh.group(rank, str(dimension))
    if got == want:
        return
    if sorted(got) == want:
        raise Wrong(f"{where} is {got}: the right ranks, but not in the order of their places, "
                    f"{want}", "A collective gathers in the order of the group.",
                    code="wrong_order")
    if rank not in got:
        raise Wrong(f"{where} is {_short(got)}: rank {rank} itself is missing",
                    code="own_rank_missing")
    if len(got) != len(want):
        raise Wrong(f"{where} has {len(got)} ranks, but dimension {dimension} has "
                    f"{mesh.sizes[dimension]} places", code="wrong_count")
    other = next((each for each in range(len(mesh.sizes))
                  if each != dimension and got == mesh.group(rank, str(each))), None)
    if other is not None:
        raise Wrong(f"{where} is {_short(got)}, the group of dimension {other}",
                    "The ranks of a group differ in the place of its dimension alone.",
                    code="other_dimension")
    raise Wrong(f"{where} is {_short(got)}, but it should be {_short(want)}",
                "All places but one stay as they are; from places to a rank is the way back of "
                "coordinates.", code="wrong_group")


def _whole_numbers(returned, where, what) -> tuple[int, ...]:
    values = as_list(returned)
    if values is None:
        raise Wrong(f"{where} returned {kind_of(returned)}, not {what}", code="wrong_type")
    numbers = [as_number(value) for value in values]
    for value, number in zip(values, numbers, strict=True):
        if number is None or number % 1 != 0:  # of nan and infinity it is nan
            raise Wrong(f"{where} has {kind_of(value) if number is None else number} in it: whole "
                        "numbers are needed", code="not_a_number")
    return tuple(map(int, numbers))


def _short(ranks) -> str:
    return f"[{', '.join(map(str, ranks[:6]))}{', …' * (len(ranks) > 6)}]"


# Tables in which other cells, several, or none are wrong.
_DRAWN = {
    "a table without a mistake": [MeshRow(8192, 8, 1, 16, 64), MeshRow(1024, 4, 2, 4, 32)],
    "a table with two mistakes": [MeshRow(512, 8, 1, 4, 32), MeshRow(512, 8, 1, 4, 16),
                                  MeshRow(96, 2, 3, 4, 4), MeshRow(64, 1, 1, 1, 64)],
    "a table whose size is too large": [MeshRow(2048, 8, 4, 8, 16)],
    "a table of one GPU": [MeshRow(1, 1, 1, 1, 1)]}


@check("7.22")
def check_wrong_rows(wrong_rows: Callable):
    """wrong_rows(rows) -> row number -> the data-parallel size that its GPUs leave, for each row
    whose printed one is another."""
    for name, rows in {"Llama 3's table": LLAMA_3, **_DRAWN}.items():
        want = {number: row.gpus // (row.tensor * row.context * row.pipeline)
                for number, row in enumerate(rows) if row.data * row.tensor * row.context
                * row.pipeline != row.gpus}
        returned = wrong_rows(list(rows))
        if not isinstance(returned, dict):
            raise Wrong(f"{name}: wrong_rows returned {kind_of(returned)}, not a dictionary",
                        "Row number -> the right size.", code="wrong_type")
        got = {as_number(number): as_number(size) for number, size in returned.items()}
        for number in sorted(set(want) - set(got)):
            raise Wrong(f"{name}: row {number} is wrong, and you do not name it: {rows[number]}",
                        "The product of the four sizes is the number of GPUs.",
                        code="missing_entry")
        for number in sorted(set(got) - set(want), key=str):
            raise Wrong(f"{name}: you call row {number} wrong"
                        + (f", but {rows[number]}" if number in range(len(rows)) else
                           ", and there is no such row"), "Rows count from 0.", code="extra_entry")
        for number, size in want.items():
            if got[number] != size:
                raise Wrong(f"{name}: row {number} leaves {size} data-parallel ranks, you say "
                            f"{got[number]}: {rows[number]}",
                            "Divide the GPUs by all other sizes.", code="wrong_number")
    return "row 2 of Llama 3's table prints 4 where the product leaves 8; tables drawn here, too"
