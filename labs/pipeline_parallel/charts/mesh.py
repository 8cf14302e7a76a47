"""The pictures of part C: which nodes a rank's groups are on, what a rank holds at each stage, and
which way of spreading a job is fast."""

from collections.abc import Callable

from matplotlib.patches import Patch, Rectangle

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.mesh import Mesh

DIMENSIONS = {"data": 32, "pipeline": 12, "tensor": 8}
ORDERS = (("data", "pipeline", "tensor"), ("tensor", "pipeline", "data"))
COLOURS = {"data": palette.MEMORY["gradients"], "pipeline": palette.MEMORY["activations"],
           "tensor": palette.MEMORY["parameters"]}
_NODES_IN_A_ROW = 24


@shows("7.21")
def show_mesh(group: Callable, rank: int = 0) -> Picture:
    """Draws the 384 nodes of a job of 3,072 GPUs, and on which of them the three groups of a rank
    are, for two orders of the dimensions. group: the student's function."""
    figure, axes = canvas(WIDTH, 4.25, ncols=2)
    words = []
    for ax, names in zip(axes, ORDERS, strict=True):
        mesh = Mesh(names, tuple(DIMENSIONS[name] for name in names))
        groups = {name: list(group(rank, number, mesh.sizes)) for number, name in enumerate(names)}
        nodes = {name: mesh.nodes(ranks) for name, ranks in groups.items()}
        _draw_nodes(ax, mesh, nodes)
        ax.set_title(" × ".join(f"{name} {DIMENSIONS[name]}" for name in names), fontsize=10,
                     loc="left")
        words.append(f"{' × '.join(names)}: " + ", ".join(
            f"the {len(groups[name])} ranks of rank {rank}'s {name} group are on "
            f"{len(nodes[name])} node{'s' * (len(nodes[name]) > 1)}" for name in reversed(names)))
        ax.set_xlabel("\n".join(f"{name}: {len(groups[name])} ranks on {len(nodes[name])} "
                                f"node{'s' * (len(nodes[name]) > 1)}" for name in DIMENSIONS))
    handles = [Patch(color=colour, label=f"{name} group of rank {rank}")
               for name, colour in COLOURS.items()]
    marks.legend_above(figure, [*handles, Patch(facecolor=palette.SURFACE,
                                                edgecolor=palette.BORDER, label="a node: 8 GPUs")])
    if (guess := guessed("7.21")) is not None:
        marks.note_below(figure, f"Your guess for the pipeline group: {guess:g} nodes.")
    return Picture(figure, "\n".join(words), data=guess)


def _draw_nodes(ax, mesh, nodes):
    """A square for each node, row by row; divided among the groups that are on it."""
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
