"""The picture between exercises 9.4 and 9.5: losses of a run whose experts' gradients are right and
of one where they are twice as large, under AdamW and under SGD."""


from dataclasses import dataclass

import torch
import torch.distributed as dist
from matplotlib.lines import Line2D

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.mixture_of_experts.reference_parallel import (
    Layout,
    divide_experts,
    kind_of,
    sum_gradients,
)
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training import data
from labs.training.mixtures import Mixture
from labs.training.models import move_to_rank
from labs.workers import devices
from labs.workers.launcher import launch

LAYOUT = Layout(4, 2)
STEPS = 30
_SIZES = {"layers": 1, "hidden": 32, "ffn": 32, "experts": 4, "context": 32}
_PER_RANK = 4
OPTIMIZERS = {"AdamW": (torch.optim.AdamW, {"lr": 3e-3}),
              "SGD": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9})}
_RIGHT, _DOUBLED = "right", "experts' gradients doubled"


@shows("9.4")
def show_adamw_hides_it() -> Picture:
    """Draws the loss of 30 steps on 4 ranks, EP 2: with the right gradients, and with the experts
    averaged over their replicas only. Same model and batch; AdamW on the left, SGD on the right."""
    runs = launch(_train_all, ranks=LAYOUT.ranks, quiet=True)[0]
    losses = {name: {kind: run.losses for kind, run in kinds.items()}
              for name, kinds in runs.items()}
    apart = {name: max(abs(one - other) for one, other in zip(*runs.values(), strict=True))
             for name, runs in losses.items()}
    lesson = (f"Doubled expert gradients change a loss by {_amount(apart['AdamW'])} with "
              f"AdamW, by up to {_amount(apart['SGD'])} with SGD")
    times = runs["SGD"][_DOUBLED].first_norm / runs["SGD"][_RIGHT].first_norm
    note = marks.answered(guessed("9.4"), times, "times too large")
    figure, axes = canvas(WIDTH, 3.2 + marks.HEADLINE + marks.NOTE_LINE * bool(note), ncols=2,
                          sharey=True)
    for ax, (name, runs) in zip(axes, losses.items(), strict=True):
        steps = range(1, STEPS + 1)
        # The right one is broad, so that both are seen where they are equal.
        ax.plot(steps, runs[_RIGHT], color=palette.RUNS[1], linewidth=6, alpha=0.5,
                solid_capstyle="round")
        ax.plot(steps, runs[_DOUBLED], color=palette.RUNS[2], linewidth=1.4)
        ax.set_xlabel(f"step of {name}")
        ax.grid(axis="y", color=palette.GRID)
    axes[0].set_ylabel("loss, mean of the ranks")
    marks.headline(figure, lesson)
    marks.legend_above(figure, [
        Line2D([], [], color=palette.RUNS[1], linewidth=6, alpha=0.5, label=_RIGHT),
        Line2D([], [], color=palette.RUNS[2], linewidth=1.4, label=_DOUBLED)])
    marks.note_below(figure, note)
    words = [f"{name}, {kind}: {runs[kind][0]:.3f} before step 1, {runs[kind][-1]:.3f} before step "
             f"{STEPS}" for name, runs in losses.items() for kind in runs]
    return Picture(figure, "\n".join([lesson, *words, note]).strip(), data=losses)


def _amount(difference: float) -> str:
    """Rounding differs by machine, and what is smaller is nothing but rounding."""
    return "less than 0.0001" if difference < 1e-4 else f"{difference:.1g}"


@dataclass(frozen=True)
class _Run:
    """losses: the mean of all ranks, at each step. first_norm: of the gradients of rank 0's experts
    in the first step, as the optimizer gets them."""

    losses: list[float]
    first_norm: float


def _train_all() -> dict[str, dict[str, _Run]]:
    """On a rank: optimizer -> gradients -> its run."""
    expert_group, replicas = LAYOUT.groups()
    return {name: {_RIGHT: _train(optimizer, LAYOUT.ranks, expert_group, replicas),
                   _DOUBLED: _train(optimizer, LAYOUT.replicas, expert_group, replicas)}
            for name, optimizer in OPTIMIZERS.items()}


def _train(optimizer, divisor, expert_group, replicas) -> _Run:
    """Trains with the experts' sums divided by `divisor`."""
    model = divide_experts(move_to_rank(Mixture(**_SIZES)), expert_group)
    kind, settings = optimizer
    optimizer, losses, norms = kind(model.parameters(), **settings), [], []
    [batch] = data.lm_batches(1, _PER_RANK * LAYOUT.ranks, _SIZES["context"])
    own = data.shard(batch, dist.get_rank(), LAYOUT.ranks)["input_ids"].to(devices.device())
    # The same batch in each step: what differs between batches would hide what is to be seen.
    for _ in range(STEPS):
        loss = model(own).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        sum_gradients(gradients, replicas)
        for name, gradient in gradients.items():
            gradient /= divisor if kind_of(name) == "experts" else LAYOUT.ranks
        norms.append(model.layers[0].mlp.experts.down.grad.norm().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return _Run((total / LAYOUT.ranks).tolist(), norms[0])
