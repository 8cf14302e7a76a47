"""What balancing does to a training, and what a micro-batch's auxiliary loss is worth."""

from collections.abc import Callable
from statistics import mean

import torch
import torch.distributed as dist
from matplotlib.ticker import MaxNLocator

from labs.checks.numbers import require_number
from labs.checks.verdicts import shows
from labs.meters.metrics import Metric
from labs.mixture_of_experts import balance_rules
from labs.mixture_of_experts.trained_routers import (
    COEFFICIENT,
    EXPERTS,
    LOSS,
    SPEED,
    Run,
    reference_runs,
    train_mixtures,
)
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.workers import devices
from labs.workers.launcher import launch

LAST = 20  # steps, of which the mean is said
MICRO_BATCHES, RANKS = 8, 2


@shows("9.6")
def show_balance(auxiliary_loss: Callable, route_with_bias: Callable, new_bias: Callable
                 ) -> Picture:
    """Trains three small mixtures on real text with the student's functions, and draws the largest
    count divided by the mean, and the language model's loss, over the steps."""
    runs = train_mixtures(auxiliary_loss, route_with_bias, new_bias)
    ends = {name: (mean(run.largest[-LAST:]), mean(run.losses[-LAST:]))
            for name, run in runs.items()}
    lesson = "Largest count divided by the mean: " + ", ".join(
        f"{name} {largest:.1f}" for name, (largest, _) in ends.items())
    figure, (left, right) = canvas(WIDTH, 3.5 + marks.HEADLINE + marks.NOTE_LINE, ncols=2)
    marks.headline(figure, lesson)
    for number, (name, run) in enumerate(runs.items(), 1):
        style = {"color": palette.RUNS[number], "linewidth": 1.6, "label": name}
        left.plot(range(1, len(run.largest) + 1), run.largest, **style)
        # nearly the same in all runs: the first line is wide, so that it shows beside the others
        right.plot(range(1, len(run.losses) + 1), run.losses,
                   **style | {"linewidth": 6.4 - 1.6 * number})
    left.axhline(1.0, color=palette.PREDICTED, linestyle=(0, (4, 3)), linewidth=1.1)
    left.set_ylim(0.9, None)
    for ax, title in ((left, "largest count / mean"), (right, "loss of the language model, nats "
                                                       "per byte")):
        ax.set_title(title, fontsize=10, loc="left", color=palette.INK)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("step")
        ax.grid(axis="y", color=palette.GRID)
        ax.set_axisbelow(True)
    right.legend(frameon=False, loc="upper right")
    note = (f"{EXPERTS} experts in each of 2 layers, 2 for each token; coefficient of the loss "
            f"{COEFFICIENT:g}, speed of the bias {SPEED:g}.")
    marks.note_below(figure, note)
    words = [f"{name}: largest count / mean {run.largest[0]:.2f} at first, {ends[name][0]:.2f} in "
             f"the last {LAST} steps; loss {run.losses[0]:.2f} → {ends[name][1]:.2f}"
             for name, run in runs.items()]
    return Picture(figure, "\n".join([lesson, *words, note]), data=runs, metrics=[
        metric for name, (largest, loss) in ends.items() for metric in (
            Metric(f"{name} largest / mean", largest, "times"),
            Metric(f"{name} loss", loss, "nats per byte"))])


@shows("9.6")
def show_micro_batches(auxiliary_loss: Callable) -> Picture:
    """The auxiliary loss of 8 micro-batches of real text, by the router that was trained with it:
    one by one, their mean, with the counts of all ranks, and of the batch of all."""
    run = reference_runs()[LOSS]
    logits = run.trained[:MICRO_BATCHES]  # (micro-batches, tokens, experts)
    each = [_value(auxiliary_loss, part, run) for part in logits]
    whole = _value(auxiliary_loss, logits.flatten(0, 1), run)
    summed = launch(_with_all_counts, logits, run.bias, ranks=RANKS, quiet=True)[0]
    rows = {"8 micro-batches": each, "their mean": [mean(each)],
            "counts of all ranks first": [summed], "one batch of all 8": [whole]}
    lesson = (f"Mean of 8 micro-batches {mean(each):.3f}, the batch of all {whole:.3f}, with all "
              f"counts summed first {summed:.3f}")
    note = (f"{logits.shape[1]} tokens of text in each. “Counts of all ranks first”: {RANKS} ranks "
            f"with {MICRO_BATCHES // RANKS} micro-batches each all-reduce their counts, and each "
            "micro-batch has its own P.")
    figure, ax = canvas(WIDTH, 2.4 + marks.HEADLINE + 2 * marks.NOTE_LINE)
    marks.headline(figure, lesson)
    for place, (values, colour) in enumerate(zip(rows.values(), (
            palette.MUTED, palette.INK, *[palette.RUNS[2]] * 2), strict=True)):
        ax.plot(values, [place] * len(values), "o", color=colour, markersize=8, alpha=0.8)
        if len(values) == 1:
            ax.annotate(f"{values[0]:.3f}", (values[0], place), xytext=(9, 0),
                        textcoords="offset points", va="center", fontsize=10)
    marks.name_rows(ax, list(rows))
    ax.axvline(1.0, color=palette.PREDICTED, linestyle=(0, (4, 3)), linewidth=1.1)
    ax.set_xlabel("auxiliary loss; 1 for equal shares")
    ax.grid(axis="x", color=palette.GRID)
    ax.set_axisbelow(True)
    marks.note_below(figure, note)
    words = [f"{name}: " + ", ".join(f"{value:.3f}" for value in values)
             for name, values in rows.items()]
    return Picture(figure, "\n".join([lesson, "auxiliary loss, 1 for equal shares", *words, note]),
                   data=rows, metrics=[Metric(f"auxiliary loss, {name}", values[0], "")
                                       for name, values in rows.items() if len(values) == 1])


def _value(auxiliary_loss, logits, run: Run) -> float:
    chosen = balance_rules.route_with_bias(logits, run.bias, 2)[1]
    loss = auxiliary_loss(logits, chosen)
    return require_number(loss.detach() if isinstance(loss, torch.Tensor) else loss,
                          "auxiliary_loss")


def _with_all_counts(logits, bias) -> float:
    """On a rank: the mean over all ranks and micro-batches of E · Σ f · P, with f of all of them
    and P of one micro-batch."""
    rank, device = dist.get_rank(), devices.device()
    mine = logits.chunk(dist.get_world_size())[rank].to(device)
    chosen = [balance_rules.route_with_bias(part, bias.to(device), 2)[1] for part in mine]
    counts = torch.cat(chosen).flatten().bincount(minlength=EXPERTS).float()
    dist.all_reduce(counts)
    shares = counts / counts.sum()
    means = torch.stack([part.softmax(-1).mean(0) for part in mine])  # (micro-batches, experts)
    loss = EXPERTS * (shares * means).sum(1).mean()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()
