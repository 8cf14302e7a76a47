"""Exercise 6.18: the fastest of the plans that were tried, chosen before any of them runs."""

from collections.abc import Callable
from dataclasses import replace

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.gpu_runs.run import GpuRun
from labs.scaling.fastest_rules import (
    LEAST_HINT,
    LIMIT_HINT,
    MEMORY_HINT,
    NEAR,
    RULES,
    SECONDS_HINT,
    Rule,
    right,
)
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

_TICKS = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)
PUBLIC = (("8B", 16), ("8B", 32), ("8B", 8), ("1B", 16), ("1B", 32))


@check("6.18")
def check_fastest(fastest: Callable):
    """fastest(plans): of the candidates whose memory_high fits, and that are within 5 % of the
    fastest of these, the one with the least memory_high; None where none fits."""
    require_signature(fastest, ("plans",))
    cases = {**made_up(), **{f"{model} on {gpus} H100s": candidates(model, gpus)
                             for model, gpus in PUBLIC}}
    chosen = {name: _asked(name, fastest, plans) for name, plans in cases.items()}
    for name, got in chosen.items():
        _judge(name, cases[name], got, lambda: _rule(cases, chosen))
    speeds = [_speed(*asked) for asked in PUBLIC]
    return (f"right for {len(cases)} lists of plans; beside what was measured, the plans that you "
            f"choose reach {100 * min(speeds):.0f} to {100 * max(speeds):.0f} % of the fastest "
            "one's speed, and all of them ran")


def _asked(name, fastest, plans) -> Candidate | None:
    """The student's choice; raises Wrong if it is none of the plans."""
    kept = UnchangedInputs("fastest", plans=[vars(plan.step) for plan in plans])
    given = list(plans)
    got = fastest(given)
    kept.judge()
    if given != plans:
        raise Wrong("fastest changed the list that it was given",
                    "Make a list of your own: sorted(plans) in place of plans.sort().",
                    code="changes_input")
    if got is not None and got not in plans:
        raise Wrong(f"{name}: fastest returned {kind_of(got)}, none of the plans",
                    "Return one of the plans, or None where none fits.", code="no_plan")
    return got


def _rule(cases, chosen) -> Rule | None:
    """The known rule that leads to every one of the choices."""
    return next((rule for rule in RULES if all(
        rule.choose(plans) == chosen[name] for name, plans in cases.items())), None)


def _judge(name, plans, got, rule: Callable[[], Rule | None]):
    want = right(plans)
    if got == want:
        return
    if got is None:
        said, code = f"you chose none, but {_memory(want)} fits", "nothing_returned"
        hint = "A plan fits if memory_high is at most free. Where any fits, one is returned."
    elif got.memory_high > got.free:
        may = "may not fit" if got.memory <= got.free else "does not fit"
        said, code, hint = f"{_memory(got)} {may}{_ended(name, got)}", "does_not_fit", MEMORY_HINT
        if want is None:
            hint = "Return None where the upper end of every interval is above `free`."
    else:
        took, best = right_seconds(got.step), right_seconds(want.step)
        shortest = min(right_seconds(plan.step) for plan in plans
                       if plan.memory_high <= plan.free)
        if took > NEAR * shortest:
            said, code = (f"{got.name} takes {took / shortest:.3f} times the shortest step of "
                          f"those that fit, {unless_graded(want.name)} "
                          f"{best / shortest:.3f} times"
                          ), "slower_choice"
            hint = f"{SECONDS_HINT} {LIMIT_HINT}"
        else:
            said, code = (f"{unless_graded(want.name)} is as fast as {got.name}, to 5 %, and takes "
                          f"less memory: up to {want.memory_high / GB:.1f} in place of "
                          f"{got.memory_high / GB:.1f} GB"), "more_memory"
            hint = f"{LIMIT_HINT} {LEAST_HINT}"
    found = rule()
    if found:
        raise Wrong(f"{name}: {said}: {found.sentence}", found.hint, code=found.code)
    raise Wrong(f"{name}: {said}", hint, code=code)


def _memory(plan) -> str:
    return (f"{plan.name} ({plan.memory / GB:.1f} GB, up to {plan.memory_high / GB:.1f}, of "
            f"{plan.free / GB:.1f} GB)")


def _ended(name, plan) -> str:
    """That the plan really ran out of memory, where it was tried and did."""
    found = [run for asked in PUBLIC if name.startswith(f"{asked[0]} on {asked[1]} ")
             for run in candidate_runs(*asked) if candidate_of(run) == plan]
    return ", and it ran out of memory when it was tried" if found and not found[0].ran else ""


def made_up() -> dict[str, list[Candidate]]:
    """Name -> plans that differ in one thing; then drawn ones. Each rule of RULES chooses otherwise
    in one of them at least."""
    rng = new_generator()
    step = GpuStep("step", 8, 4, 2e-3, 1e-3, 1e-3, 0.01)
    plan = Candidate("middle", step, 40 * GB, 44 * GB, 80 * GB)

    def other(name, memory=40, high=0.0, free=80, of=plan, **parts):
        return replace(of, name=name, memory=memory * GB, memory_high=(high or 1.1 * memory) * GB,
                       free=free * GB, step=replace(of.step, **parts))

    def slower(factor, name, memory, high=0.0, of=plan):
        return other(name, memory, high, of=of, once=of.step.once
                     + (factor - 1) * right_seconds(of.step))

    bound = other("launch-bound, few kernels", kernels=1e-3, launch=4e-3)
    few = other("few micro-batches, long kernels", kernels=3e-2, micro_batches=1)
    many = other("many micro-batches, short kernels", kernels=1.5e-3, micro_batches=16)
    large = other("fast, and may not fit", 76, 83, kernels=1e-3)
    huge = other("fast and too large", 90, kernels=1e-3)
    alike = slower(1.049, "4.9 % slower", 30)
    far = slower(1.051, "5.1 % slower", 20)
    found = {
        "two plans, one launch-bound": [bound, plan],
        "micro-batches that differ": [few, many, plan],
        "one that may not fit": [large, plan, bound], "one too large": [huge, bound, plan],
        "one that just fits": [plan, other("fits to the last byte", 76, 80, kernels=1e-3)],
        "none that fits": [large, huge], "no plan": [], "one plan": [bound],
        "plans 4.9 and 5.1 % slower": [plan, alike, far],
        "the same, and one that does not fit": [huge, far, alike, plan],
        "three equally good, the last with least memory": [
            plan, slower(1.02, "2 % slower", 30), slower(1.01, "1 % slower", 20)],
        "two equally good, with intervals that differ": [
            other("wide interval", 30, 50), other("narrow interval", 36, 41)],
        "two equally good, the narrower one larger": [
            other("narrower, larger", 60, 61), other("wider, smaller", 40, 50)],
        "the head decides, of many micro-batches": [
            other("long head, many", 20, kernels=8e-4, launch=0, head=5.5e-3, micro_batches=8),
            plan],
        "`once` decides": [other("long once", 20, once=0.05), plan],
        "the head decides": [other("long head", 20, head=8e-3), plan],
        "head and `once` decide": [other("long head and once", 20, head=2.5e-3, once=0.013), plan],
        "GPUs with 141 GB": [replace(each, free=141 * GB) for each in (huge, plan, bound)],
        "GPUs with 40 GB": [replace(each, free=40 * GB) for each in (plan, large)] + [
            replace(bound, memory=20 * GB, memory_high=22 * GB, free=40 * GB)]}
    for number in range(3):
        free = rng.uniform(40, 90) * GB
        drawn = [Candidate(f"plan {place}", GpuStep(
            f"step {place}", 16, rng.randint(2, 32), rng.uniform(1e-3, 2e-2),
            rng.uniform(1e-3, 1e-2), rng.uniform(0, 2e-2), rng.uniform(0, 0.5)), memory,
            rng.uniform(1.05, 1.3) * memory, free)
            for place in range(6) for memory in [rng.uniform(0.3, 1.1) * free]]
        found[f"random plans {number + 1}"] = [
            *drawn, replace(bound, name="always fits", memory=0.1 * free, memory_high=0.12 * free,
                            free=free)]
    for rule in RULES:
        assert any(rule.choose(plans) != right(plans) for plans in found.values()), rule.sentence
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
    marks.name_rows(ax, [f"{plan.name.split(': ')[1]}: {plan.memory / GB:.0f}, up to "
                         f"{plan.memory_high / GB:.0f} GB" for plan in plans])
    ax.set_xscale("log")
    slowest = max(run.seconds for run in ran)
    ax.set_xlim(0.85 * best, 1.5 * slowest)
    ticks = [tick for tick in _TICKS if 0.85 * best <= tick <= 1.5 * slowest]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.minorticks_off()
    ax.set_xlabel("seconds of a step")
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
    words = [f"{_memory(plan)}: predicted {right_seconds(plan.step):.2f} s, "
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
