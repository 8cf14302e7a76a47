"""Exercise 6.18: the fastest of the plans that were tried, chosen before any of them runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.gpu_runs.run import GpuRun
from labs.scaling.gpu_steps import (
    Candidate,
    GpuStep,
    candidate_of,
    candidate_runs,
    candidates,
    right_seconds,
)
from labs.training.memory_categories import GB
from labs.words import counted

PUBLIC = (("8B", 16), ("8B", 32), ("8B", 8), ("1B", 16), ("1B", 32))


NEAR = 1.05  # of seconds: what the model of 6.16 cannot tell apart


def right(plans: Sequence[Candidate]) -> Candidate | None:
    """Of those whose memory fits with its interval, and that are within 5 % of the fastest of
    them, the one with the least memory."""
    fitting = [plan for plan in plans if plan.memory_high <= plan.free]
    if not fitting:
        return None
    shortest = min(right_seconds(plan.step) for plan in fitting)
    near = [plan for plan in fitting if right_seconds(plan.step) <= NEAR * shortest]
    return min(near, key=lambda plan: plan.memory_high)


@check("6.18")
def check_fastest(fastest: Callable):
    """fastest(plans): of the candidates whose memory_high fits, and that are within 5 % of the
    fastest of these, the one with the least memory_high; None where none fits."""
    require_signature(fastest, ("plans",))
    cases = {**made_up(), **{f"{model} on {gpus} H100s": candidates(model, gpus)
                             for model, gpus in PUBLIC}}
    for name, plans in cases.items():
        kept = UnchangedInputs("fastest", plans=[vars(plan.step) for plan in plans])
        given = list(plans)
        got = fastest(given)
        kept.judge()
        if given != plans:
            raise Wrong("fastest changed the list that it was given",
                        "Make a list of your own: sorted(plans) in place of plans.sort().",
                        code="changes_input")
        _judge(name, plans, got)
    speeds = {asked: _speed(*asked) for asked in PUBLIC}
    return (f"right for {len(cases)} lists of plans; beside what was measured, the plans that you "
            f"choose reach {100 * min(speeds.values()):.0f} to {100 * max(speeds.values()):.0f} % "
            "of the fastest one's speed, and all of them ran")


def _judge(name, plans, got):
    want = right(plans)
    if got is not None and got not in plans:
        raise Wrong(f"{name}: fastest returned {kind_of(got)}, none of the plans",
                    "Return one of the plans, or None where none fits.", code="no_plan")
    if want is None:
        if got is not None:
            raise Wrong(f"{name}: no plan surely fits, and you chose {_memory(got)}",
                        "Return None where the upper end of every interval is above `free`.",
                        code="does_not_fit")
        return
    if got is None:
        raise Wrong(f"{name}: you chose none, but {want.name} fits: {_memory(want)}",
                    "A plan fits if memory_high is at most free.", code="nothing_returned")
    if got.memory_high > got.free:
        if got.memory <= got.free:
            raise Wrong(f"{name}: {_memory(got)} may not fit{_ended(name, got)}",
                        "A prediction has an interval. Compare its upper end, memory_high, with "
                        "free.", code="may_not_fit")
        raise Wrong(f"{name}: {_memory(got)} does not fit{_ended(name, got)}",
                    "First drop the plans whose memory_high is above free.", code="does_not_fit")
    shortest = min(right_seconds(plan.step) for plan in plans if plan.memory_high <= plan.free)
    if right_seconds(got.step) > NEAR * shortest:
        raise Wrong(f"{name}: {got.name} fits, but {want.name} fits too and is faster, "
                    f"{right_seconds(want.step):.3g} s a step in place of "
                    f"{right_seconds(got.step):.3g}",
                    "The seconds of a plan are sum(step_parts(plan.step).values()), of exercise "
                    "6.16.", code="slower_choice")
    if got != want and got.memory_high > want.memory_high:
        raise Wrong(f"{name}: {want.name} is as fast as {got.name}, to 5 %, and takes less memory: "
                    f"{want.memory_high / GB:.1f} in place of {got.memory_high / GB:.1f} GB",
                    "Of the plans that fit and take at most 1.05 times the shortest step, choose "
                    "the one with the least memory_high.", code="more_memory")


def _memory(plan) -> str:
    return (f"{plan.name} ({plan.memory / GB:.1f} GB, up to {plan.memory_high / GB:.1f}, of "
            f"{plan.free / GB:.1f} GB)")


def _ended(name, plan) -> str:
    """That the plan really ran out of memory, where it was tried and did."""
    found = [run for asked in PUBLIC if name.startswith(f"{asked[0]} on {asked[1]} ")
             for run in candidate_runs(*asked) if candidate_of(run) == plan]
    return ", and it ran out of memory when it was tried" if found and not found[0].ran else ""


def made_up() -> dict[str, list[Candidate]]:
    """Name -> plans that differ in one thing; then drawn ones, of which some may not fit."""
    rng = new_generator()
    step = GpuStep("step", 8, 4, 2e-3, 1e-3, 1e-3, 0.0)
    plan = Candidate("middle", step, 40 * GB, 44 * GB, 80 * GB)
    slow = replace(plan, name="launch-bound, few kernels",
                   step=replace(step, kernels=1e-3, launch=4e-3))
    few = replace(plan, name="few micro-batches, long kernels",
                  step=replace(step, kernels=3e-2, micro_batches=1))
    large = replace(plan, name="fast, and may not fit", step=replace(step, kernels=1e-3),
                    memory=76 * GB, memory_high=83 * GB)
    huge = replace(large, name="fast and too large", memory=90 * GB, memory_high=99 * GB)
    least = replace(slow, name="least memory", memory=10 * GB, memory_high=11 * GB)
    alike = replace(plan, name="3 % slower, less memory", memory=30 * GB, memory_high=33 * GB,
                    step=replace(step, kernels=1.03 * step.kernels))
    slower = replace(alike, name="7 % slower, less memory", memory=20 * GB, memory_high=22 * GB,
                     step=replace(step, kernels=1.08 * step.kernels))
    just = replace(large, name="fits to the last byte", memory_high=80 * GB)
    found = {"two plans, one launch-bound": [slow, plan], "micro-batches that differ": [few, plan],
             "one that may not fit": [large, plan, slow], "one too large": [huge, slow, least],
             "one that just fits": [plan, just, least], "none that fits": [large, huge],
             "no plan": [], "one plan": [slow],
             "one as fast with less memory": [plan, alike, slower],
             "one as fast as what does not fit": [huge, plan, alike, slower],
             "GPUs with 141 GB": [replace(each, free=141 * GB) for each in (huge, plan, slow)],
             "GPUs with 40 GB": [replace(each, free=40 * GB) for each in (plan, large, least)]}
    for number in range(3):
        free = rng.uniform(40, 90) * GB
        drawn = [Candidate(f"plan {place}", GpuStep(
            f"step {place}", 16, rng.randint(2, 32), rng.uniform(1e-3, 2e-2),
            rng.uniform(1e-3, 1e-2), rng.uniform(0, 2e-2), rng.uniform(0, 0.5)), memory,
            rng.uniform(1.05, 1.3) * memory, free)
            for place in range(6) for memory in [rng.uniform(0.3, 1.1) * free]]
        drawn.append(replace(slow, name="always fits", memory=0.1 * free, memory_high=0.12 * free,
                             free=free))
        found[f"random plans {number + 1}"] = drawn
    return found


def _speed(model, gpus) -> float:
    """Of the plan that is rightly chosen, over the fastest that was measured."""
    tried = candidate_runs(model, gpus)
    chosen = right(candidates(model, gpus))
    seconds = {candidate_of(run).name: run.seconds for run in tried if run.seconds}
    return min(seconds.values()) / seconds[chosen.name]


@shows("6.18")
def show_fastest(fastest: Callable, model: str = "8B", gpus: int = 16) -> Picture:
    """Draws every plan that was tried: predicted and measured seconds, those that ran out of
    memory, and the plan that the student's function chose."""
    tried = sorted(candidate_runs(model, gpus),
                   key=lambda run: (not run.ran, right_seconds(candidate_of(run).step)))
    plans = [candidate_of(run) for run in tried]
    chosen = fastest(list(plans))
    if chosen not in plans:
        raise Wrong(f"fastest returned {kind_of(chosen)}, none of the plans",
                    "Return one of the plans.", code="no_plan")
    figure, ax = canvas(WIDTH, 0.27 * len(plans) + 0.9 + marks.HEADLINE)
    for place, (run, plan) in enumerate(zip(tried, plans, strict=True)):
        _draw(ax, place, run, plan, plan == chosen)
    ran = [run for run in tried if run.seconds]
    best = min(run.seconds for run in ran)
    measured = tried[plans.index(chosen)].seconds
    lesson = (f"{len(ran)} of {len(tried)} plans ran; yours "
              + (f"reaches {100 * best / measured:.0f} % of the fastest one's speed" if measured
                 else "ran out of memory"))
    marks.headline(figure, lesson)
    marks.name_rows(ax, [plan.name.split(": ")[1] for plan in plans])
    ax.set_xscale("log")
    ax.set_xlim(0.85 * best, 1.5 * max(run.seconds for run in ran))
    ax.set_xticks([best * step for step in (1, 1.5, 2, 3)],
                  [f"{best * step:.3g}" for step in (1, 1.5, 2, 3)])
    ax.xaxis.minorticks_off()
    ax.set_xlabel("seconds of a step; the leftmost number is the fastest plan's")
    marks.legend_above(figure, [
        Line2D([], [], marker="|", linestyle="", color=palette.INK, markersize=9,
               markeredgewidth=2, label="predicted"),
        Line2D([], [], marker="o", linestyle="", color=palette.RUNS[1], label="measured"),
        Line2D([], [], marker="x", linestyle="", color=palette.RUNS[2],
               label="out of memory (at its predicted seconds)"),
        Line2D([], [], marker="o", linestyle="", markerfacecolor="none", color=palette.INK,
               markersize=10, label="your choice")])
    note = marks.answered(guessed("6.18"), len(ran), "that ran")
    if note:
        marks.note_below(figure, note)
    words = [f"{plan.name}: predicted {right_seconds(plan.step):.2f} s, "
             + (f"measured {run.seconds:.2f} s" if run.seconds else "ran out of memory")
             for run, plan in zip(tried, plans, strict=True)]
    return Picture(figure, "\n".join([f"{model} on {counted(gpus, 'H100')}. {lesson}", *words,
                                      note]).strip(), data=plans)


def _draw(ax, place, run: GpuRun, plan: Candidate, is_chosen):
    seconds = right_seconds(plan.step)
    if run.seconds:
        ax.plot([seconds], [place], "|", color=palette.INK, markersize=9, markeredgewidth=2)
        ax.plot([run.seconds], [place], "o", color=palette.RUNS[1], markersize=5)
    else:  # at the seconds that it would take
        ax.plot([seconds], [place], "x", color=palette.RUNS[2], markersize=6)
    if is_chosen:
        ax.plot([run.seconds or seconds], [place], "o", color=palette.INK, markersize=11,
                markerfacecolor="none")
