"""Exercise 6.16: the seconds of a step, whose layers wait for the GPU or for the host."""

import copy
from collections.abc import Callable
from statistics import median

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import (
    Mistake,
    as_number,
    common_cause,
    judge_number,
    require_number,
    require_signature,
)
from labs.checks.verdicts import check, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.scaling.gpu_steps import GpuStep, measured_step, right_seconds, runs, step_of

BOUND = 5  # percent of median error on the runs on up to 16 GPUs
_LAYER = "A layer is done when its kernels are started and have run: the longer of the two counts."
_EACH = "Each micro-batch goes through all layers and the head."


def _step(layer, micro_batches=None, head=None, once=None) -> Callable[[GpuStep], float]:
    """The right formula with one part changed; each is a function of the step."""
    def seconds(step):
        often = micro_batches(step) if micro_batches else step.micro_batches
        last = head(step) if head else step.head
        return often * (step.layers * layer(step) + last) + (once(step) if once else step.once)
    return seconds


def _longer(step) -> float:
    return max(step.kernels, step.launch)


MISTAKES: list[Mistake] = [
    Mistake("host_missing", _step(lambda step: step.kernels), "the host is missing", _LAYER),
    Mistake("kernels_missing", _step(lambda step: step.launch), "the kernels are missing", _LAYER),
    Mistake("launch_added", _step(lambda step: step.kernels + step.launch),
            "launch and kernels are added", "The host starts the next kernels while the GPU runs "
            "those before: they overlap."),
    Mistake("shorter_counted", _step(lambda step: min(step.kernels, step.launch)),
            "the shorter of kernels and launch counts", _LAYER),
    Mistake("one_micro_batch", _step(_longer, micro_batches=lambda step: 1),
            "only one micro-batch is counted", _EACH),
    Mistake("head_missing", _step(_longer, head=lambda step: 0), "the head is missing", _EACH),
    Mistake("head_once", _step(_longer, head=lambda step: step.head / step.micro_batches),
            "the head is counted for one micro-batch", _EACH),
    Mistake("head_in_layers", _step(_longer, head=lambda step: step.layers * step.head),
            "the head is counted for each layer", "The model has one head."),
    Mistake("one_layer", lambda step: step.micro_batches * (_longer(step) + step.head) + step.once,
            "only one layer is counted", _EACH),
    Mistake("once_missing", _step(_longer, once=lambda step: 0), "`once` is missing",
            "The gradients are reduced and the optimizer runs, once for the step."),
    Mistake("once_repeated", _step(_longer, once=lambda step: step.micro_batches * step.once),
            "`once` is counted for each micro-batch", "It happens once for the step."),
    Mistake("once_repeated",
            lambda step: step.micro_batches * step.layers * (_longer(step) + step.once)
            + step.micro_batches * step.head, "`once` is counted for each layer",
            "It happens once for the step."),
    Mistake("host_for_the_step", lambda step: max(
        _step(lambda one: one.kernels)(step), step.micro_batches * step.layers * step.launch),
            "the host is compared with the whole step", "While the head and the optimizer run, the "
            "host is not ahead by more than a layer: compare layer by layer."),
    Mistake("launch_once", lambda step: max(
        _step(lambda one: one.kernels)(step),
        _step(lambda one: one.kernels)(step) - step.kernels + step.launch),
            "the host delays one layer only", "It delays every layer of every micro-batch."),
    Mistake("in_milliseconds", lambda step: 1e3 * right_seconds(step), "that is in milliseconds",
            "Return seconds."),
]


@check("6.16")
def check_step_seconds(step_seconds: Callable):
    """step_seconds(step): seconds of steps that are made up, in which every mistake shows, and of
    public runs."""
    require_signature(step_seconds, ("step",))
    cases = [*made_up(), *published()]
    kept = UnchangedInputs("step_seconds", step=[vars(step) for step in cases])
    answers = [step_seconds(step) for step in cases]
    kept.judge()
    numbers = list(map(as_number, answers))
    for at, step in enumerate(cases):
        # One ulp in each of five operations: 1e-9 allows for any order of them.
        judge_number(answers[at], right_seconds(step), common_cause(MISTAKES, cases, numbers, at),
                     f"{step.name}: the step", "s", "Micro-batches, of layers and a head; then "
                     "what the step does once.")
    few, many = (_median_error(step_seconds, gpus) for gpus in (16, 256))
    return (f"right for {len(made_up())} steps that are made up and {len(published())} that ran; "
            f"beside what was measured, the median error is {few:.1f} % for {len(runs(16))} runs "
            f"on up to 16 H100s (target: at most {BOUND} %), and {many:.1f} % for "
            f"{len(runs(256))} on up to 256")


def _median_error(step_seconds, gpus) -> float:
    return median(100 * abs(require_number(step_seconds(step_of(run)), name) / run.seconds - 1)
                  for run in runs(gpus) for name in [step_of(run).name])


def made_up() -> list[GpuStep]:
    """One thing at a time, then all of them at random."""
    rng = new_generator()
    found = [
        GpuStep("one layer, one micro-batch, nothing else", 1, 1, 2.0, 0.5, 0.0, 0.0),
        GpuStep("a slow host", 1, 1, 0.5, 2.0, 0.0, 0.0),
        GpuStep("a slow host, a long head", 4, 3, 0.5, 2.0, 7.0, 1.0),
        GpuStep("a slow GPU", 4, 3, 2.0, 0.5, 0.25, 1.5),
        GpuStep("a host that needs no time", 8, 2, 0.75, 0.0, 0.5, 3.0),
        GpuStep("GPU and host alike", 8, 2, 0.75, 0.75, 0.5, 3.0)]
    for number in range(4):
        one, other = rng.uniform(1e-3, 4e-3), rng.uniform(5e-3, 20e-3)
        kernels, launch = (one, other) if number % 2 else (other, one)
        found.append(GpuStep(f"random step {number + 1}", rng.randint(2, 80), rng.randint(2, 64),
                             kernels, launch, rng.uniform(1e-3, 50e-3), rng.uniform(0.01, 0.5)))
    # Each of these must tell the larger from the smaller, or a mistake could hide.
    assert {step.kernels > step.launch for step in found[-4:]} == {True, False}
    return found


def published() -> list[GpuStep]:
    """Four runs of 1B parameters on 16 GPUs, launch-bound and not."""
    return [measured_step("1B", tensor, size)[0]
            for tensor, size in ((8, 1), (8, 16), (4, 2), (1, 1))]


@shows("6.16")
def show_steps(step_seconds: Callable) -> Picture:
    """Draws the public runs on up to 256 GPUs: what was measured over what the kernels alone take,
    and over what the student's function says, by the host's seconds for a layer over the GPU's."""
    steps = [(copy.copy(step_of(run)), run.seconds) for run in runs()]
    host = [step.launch / step.kernels for step, _ in steps]
    alone = [measured / _step(lambda one: one.kernels)(step) for step, measured in steps]
    yours = [measured / require_number(step_seconds(step), step.name) for step, measured in steps]
    figure, ax = canvas(WIDTH, 3.4 + marks.HEADLINE)
    bound = [at for at, ratio in enumerate(host) if ratio > 1]
    most = max(alone[at] for at in bound if host[at] == max(host))
    error = median(100 * abs(1 / yours[at] - 1) for at in bound)
    lesson = (f"Where the host is slower (right), kernels alone predict up to {most:.1f} times too "
              f"little; your function's median error there is {error:.1f} %")
    marks.headline(figure, lesson)
    ax.axhline(1, color=palette.MUTED, linewidth=0.8, zorder=1)
    ax.axvline(1, color=palette.MUTED, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    series = {"kernels alone": (alone, palette.RUNS[2]), "your function": (yours, palette.RUNS[1])}
    for values, colour in series.values():
        ax.plot(host, values, "o", markersize=4, alpha=0.7, color=colour, markeredgewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    marks.plain_numbers(ax.xaxis)
    marks.plain_numbers(ax.yaxis)
    ax.set_xlabel("host's seconds for a layer / GPU's seconds")
    ax.set_ylabel("measured / predicted")
    marks.legend_above(figure, [Line2D([], [], marker="o", linestyle="", color=colour, label=name)
                                for name, (_, colour) in series.items()])
    slow = measured_step("1B", 8, 1)[1]
    note = marks.answered(guessed("6.16"), slow, " s with TP 8 and micro-batch 1")
    if note:
        marks.note_below(figure, note)
    errors = {name: median(100 * abs(1 / value - 1) for value in values)
              for name, (values, _) in series.items()}
    return Picture(figure, "\n".join([lesson, *(
        f"{name}: median error {error:.1f} % of {len(steps)} runs"
        for name, error in errors.items()), note]).strip(), data=steps)
