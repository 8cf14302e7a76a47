"""Losses over the steps of several runs."""

from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture, canvas


def loss_curves(runs: dict[str, list[float]], difference: float) -> Picture:
    """Draws the loss of each step, by run: the first run broad and pale, the others on top of it.
    difference: the largest between two runs at the same step."""
    figure, ax = canvas(WIDTH, 3.1)
    for number, (name, values) in enumerate(runs.items()):
        style = {"linewidth": 7, "alpha": 0.35} if number == 0 else {"linewidth": 1.8}
        ax.plot(range(1, len(values) + 1), values, label=name, color=palette.RANKS[number], **style)
    ax.set_xlabel("step")
    ax.set_ylabel("loss, nats per byte")
    ax.grid(axis="y", color=palette.GRID)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, loc="upper right")
    ends = ", ".join(f"{name}: {values[0]:.2f} → {values[-1]:.2f}" for name, values in runs.items())
    return Picture(figure, f"{ends}; largest difference {difference:.1e}", data=runs)
