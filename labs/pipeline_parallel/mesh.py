"""Exercise 7.21: where a rank is in a mesh, and who is in its group; and the picture of which nodes
its groups are on."""

from collections.abc import Callable

from matplotlib.patches import Patch, Rectangle

from labs.checks.generator import new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.numbers import as_list, as_number
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.communication.mesh import Mesh
from labs.words import counted

# The slowest dimension first. Sizes of 1, primes and one, two and four dimensions are among them:
# an answer for 8 × 12 × 32 alone must not pass.
SIZES = ((32, 12, 8), (2, 2, 2), (2, 3), (5,), (1, 7, 1), (3, 1, 4, 2), (128, 1, 16, 8), (4, 6, 1))
TRIED = 40  # ranks of each mesh


@check("7.21")
def check_mesh(coordinates: Callable, group: Callable):
    """coordinates(rank, sizes) -> one for each size; group(rank, dimension, sizes) -> ranks."""
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
    # The first and the last rank always: off-by-one mistakes show there.
    drawn = new_generator().sample(range(1, mesh.ranks - 1), TRIED - 2)
    return [0, *drawn, mesh.ranks - 1]


def _judge_coordinates(coordinates, rank, mesh):
    returned = coordinates(rank, mesh.sizes)
    where = f"coordinates({rank}, {mesh.sizes})"
    got = _whole_numbers(returned, where, f"a coordinate for each of {len(mesh.sizes)} dimensions")
    want = mesh.coordinates(rank)
    if got == want:
        return
    right = unless_graded(want)
    if len(got) != len(want):
        raise Wrong(f"{where} is {got}: {counted(len(got), 'coordinate')} for "
                    f"{counted(len(want), 'dimension')}", code="wrong_count")
    # No two ranks may be in one place, and the last dimension is the one in which neighbours
    # differ: a mesh filled the other way round puts a tensor-parallel group on 8 nodes.
    turned = Mesh(mesh.names, mesh.sizes[::-1]).coordinates(rank)
    if got == turned[::-1]:
        raise Wrong(f"{where} is {got}, but it should be {right}: yours counts the first dimension "
                    "fastest", "Neighbours, such as ranks 0 and 1, differ in the last dimension.",
                    code="first_dimension_fastest")
    if got == turned:
        raise Wrong(f"{where} is {got}, but it should be {right}: the sizes are taken in the order "
                    "of the other end", code="other_end_first")
    if got == want[::-1]:
        raise Wrong(f"{where} is {got}, but it should be {right}: the right coordinates in "
                    "the reversed order", "The first coordinate belongs to the first size.",
                    code="reversed_order")
    if got == tuple(place + 1 for place in want):
        raise Wrong(f"{where} is {got}, but it should be {right}: coordinates count from 0",
                    code="counts_from_one")
    if any(place >= size for place, size in zip(got, mesh.sizes, strict=True)):
        raise Wrong(f"{where} is {got}: a coordinate is a number from 0 to the size of its "
                    "dimension, less 1", code="outside_the_mesh")
    raise Wrong(f"{where} is {got}, but it should be {right}",
                "divmod(rank, last size) gives what is left for the other dimensions, and the last "
                "coordinate.", code="wrong_place")


def _judge_group(group, rank, dimension, mesh):
    returned = group(rank, dimension, mesh.sizes)
    where = f"group({rank}, {dimension}, {mesh.sizes})"
    got, want = list(_whole_numbers(returned, where, "ranks")), mesh.group(rank, str(dimension))
    if got == want:
        return
    # The invariant: the ranks that differ in this dimension alone, in the order of their places
    # there.
    if sorted(got) == want:
        raise Wrong(f"{where} is {got}: the right ranks, but not in the order of their "
                    f"coordinates, {unless_graded(want)}",
                    "A collective gathers in the order of the group.",
                    code="wrong_order")
    if rank not in got:
        raise Wrong(f"{where} is {_short(got)}: rank {rank} itself is missing",
                    code="own_rank_missing")
    if len(got) != len(want):
        raise Wrong(f"{where} has {len(got)} ranks, but dimension {dimension} has "
                    f"{mesh.sizes[dimension]} coordinates", code="wrong_count")
    other = next((each for each in range(len(mesh.sizes))
                  if each != dimension and got == mesh.group(rank, str(each))), None)
    if other is not None:
        raise Wrong(f"{where} is {_short(got)}, the group of dimension {other}",
                    "The ranks of a group differ in the coordinate of its dimension alone.",
                    code="other_dimension")
    raise Wrong(f"{where} is {_short(got)}, but it should be {unless_graded(_short(want))}",
                "All coordinates but one stay as they are. To get a rank from coordinates, invert "
                "`coordinates`.", code="wrong_group")


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


DIMENSIONS = {"data": 32, "pipeline": 12, "tensor": 8}
ORDERS = (("data", "pipeline", "tensor"), ("tensor", "pipeline", "data"))
COLOURS = {"data": palette.MEMORY["gradients"], "pipeline": palette.MEMORY["optimizer state"],
           "tensor": palette.MEMORY["parameters"]}
_NODES_IN_A_ROW = 24


@shows("7.21")
def show_mesh(group: Callable, rank: int = 0) -> Picture:
    """Draws the 384 nodes of a job of 3,072 GPUs, and on which of them the three groups of a rank
    are, for two orders of the dimensions. group: the student's function."""
    figure, axes = canvas(WIDTH, 4.25 + marks.HEADLINE, ncols=2)
    words, found = [], []
    for ax, names in zip(axes, ORDERS, strict=True):
        mesh = Mesh(names, tuple(DIMENSIONS[name] for name in names))
        groups = {name: list(group(rank, number, mesh.sizes)) for number, name in enumerate(names)}
        nodes = {name: mesh.nodes(ranks) for name, ranks in groups.items()}
        found.append(nodes)
        _draw_nodes(ax, mesh, nodes)
        ax.set_title(" × ".join(f"{name} {DIMENSIONS[name]}" for name in names), fontsize=10,
                     loc="left")
        words.append(f"{' × '.join(names)}: " + ", ".join(
            f"the {len(groups[name])} ranks of rank {rank}'s {name} group are on "
            f"{len(nodes[name])} node{'s' * (len(nodes[name]) > 1)}" for name in reversed(names)))
        ax.set_xlabel("\n".join(f"{name}: {len(groups[name])} ranks on {len(nodes[name])} "
                                f"node{'s' * (len(nodes[name]) > 1)}" for name in DIMENSIONS))
    first, second = (len(nodes["tensor"]) for nodes in found)
    lesson = (f"Tensor group of rank {rank}: on {counted(first, 'node')} as the last dimension, on "
              f"{second} as the first")
    marks.headline(figure, lesson)
    handles = [Patch(color=colour, label=f"{name} group of rank {rank}")
               for name, colour in COLOURS.items()]
    marks.legend_above(figure, [*handles, Patch(facecolor=palette.SURFACE,
                                                edgecolor=palette.BORDER, label="a node: 8 GPUs")])
    guess = guessed("7.21")
    answer = marks.answered(guess, len(found[0]["pipeline"]), "nodes of the pipeline group")
    marks.note_below(figure, answer)
    return Picture(figure, "\n".join([lesson, *words, *filter(None, [answer])]), data=guess)


def _draw_nodes(ax, mesh, nodes):
    """A square for each node, row by row; split among the groups that are on it."""
    count = mesh.ranks // mesh.gpus_per_node
    for node in range(count):
        x, y = node % _NODES_IN_A_ROW, node // _NODES_IN_A_ROW
        here = [name for name in DIMENSIONS if node in nodes[name]]
        ax.add_patch(Rectangle((x, y), 0.84, 0.84, facecolor=palette.SURFACE,
                               edgecolor=palette.BORDER, linewidth=0.5))
        for place, name in enumerate(here):
            ax.add_patch(Rectangle((x + 0.84 * place / len(here), y), 0.84 / len(here), 0.84,
                                   facecolor=COLOURS[name], linewidth=0))
    ax.set_xlim(0, _NODES_IN_A_ROW)
    ax.set_ylim(count / _NODES_IN_A_ROW, 0)
    ax.set_aspect("equal")
    ax.set(xticks=[], yticks=[])
    ax.spines["bottom"].set_visible(False)
