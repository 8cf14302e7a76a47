"""Exercise 6.17: two measured steps correct a prediction for one's own GPUs and host."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from labs.checks.generator import new_generator
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import (
    Cause,
    Mistake,
    as_number,
    common_cause,
    judge_number,
    require_numbers,
    require_signature,
)
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures.tables import Table
from labs.predictions.gpu_runs.run import GpuRun
from labs.scaling.gpu_steps import GpuStep, measured_step, right_seconds, runs, step_of

NAMES = ("large", "large_seconds", "small", "small_seconds")
RESULTS = ("factor", "launch")


@dataclass(frozen=True)
class Case:
    """Two steps of one machine, predicted and measured: the GPU is slower in `large`, the host in
    `small`. name: of the machine."""

    name: str
    large: GpuStep
    large_seconds: float
    small: GpuStep
    small_seconds: float

    @property
    def arguments(self) -> tuple:
        return tuple(getattr(self, name) for name in NAMES)


def right(case: Case) -> tuple[float, float]:
    """(what the GPU's predicted seconds are multiplied with, the host's seconds for a layer)."""
    return _factor(case), _launch(case)


def _factor(case) -> float:
    large = case.large
    computing = large.layers * large.kernels + large.head
    return (case.large_seconds - large.once) / (large.micro_batches * computing)


def _launch(case, factor=None, once=None) -> float:
    small, factor = case.small, _factor(case) if factor is None else factor
    rest = case.small_seconds - (small.once if once is None else once)
    return (rest / small.micro_batches - factor * small.head) / small.layers


def corrected(step: GpuStep, factor: float, launch: float) -> GpuStep:
    """The step on the machine that was measured."""
    return replace(step, kernels=factor * step.kernels, head=factor * step.head, launch=launch)


def _of_large(factor) -> Callable[[Case], float]:
    return lambda case: factor(case.large, case.large_seconds)


_GPU = ("In `large` the layers wait for the GPU: kernels and head together are what is left "
        "without `once`.")
FACTOR_MISTAKES = [
    Mistake("once_kept", _of_large(lambda step, seconds: seconds / (
        step.micro_batches * (step.layers * step.kernels + step.head))),
        "`once` is counted as computing", _GPU),
    Mistake("whole_step", _of_large(lambda step, seconds: seconds / right_seconds(step)),
            "it is the ratio of the whole steps", "The seconds of `once` stay as they are: take "
            "them off both."),
    Mistake("inverted", lambda case: 1 / _factor(case), "it is the inverse",
            "Predicted seconds times the factor are the measured ones."),
    Mistake("head_not_scaled", _of_large(lambda step, seconds: (
        (seconds - step.once) / step.micro_batches - step.head) / (step.layers * step.kernels)),
        "the head is not multiplied by it", "The head runs on the same GPU."),
    Mistake("head_missing", _of_large(lambda step, seconds: (seconds - step.once) / (
        step.micro_batches * step.layers * step.kernels)), "the head is missing", _GPU),
    Mistake("one_micro_batch", lambda case: _factor(case) * case.large.micro_batches,
            "only one micro-batch is counted", _GPU),
    Mistake("other_step", lambda case: (case.small_seconds - case.small.once) / (
        case.small.micro_batches * (case.small.layers * case.small.kernels + case.small.head)),
        "it is from `small`, in which the host is slower", "Only `large` says how fast the GPU "
        "is."),
    Mistake("head_once", _of_large(lambda step, seconds: (seconds - step.once) / (
        step.micro_batches * step.layers * step.kernels + step.head)),
        "the head is counted for one micro-batch", _GPU),
    Mistake("not_corrected", lambda case: 1.0, "the kernels are not corrected", _GPU)]

_HOST = "In `small` the layers wait for the host: launch is what is left for each layer."
LAUNCH_MISTAKES = [
    Mistake("head_not_scaled", lambda case: _launch(case, factor=1.0),
            "the head of `small` is not multiplied by the factor", "The head runs on the same GPU "
            "as in `large`."),
    Mistake("head_kept", lambda case: _launch(case, factor=0.0),
            "the head is counted as the host's", _HOST),
    Mistake("once_kept", lambda case: _launch(case, once=0.0), "`once` is counted as the host's",
            _HOST),
    Mistake("one_micro_batch", lambda case: _launch(case) * case.small.micro_batches,
            "it is of all micro-batches", _HOST),
    Mistake("one_layer", lambda case: _launch(case) * case.small.layers,
            "it is of all layers of a micro-batch", _HOST),
    Mistake("one_layer", lambda case: _launch(case) * case.small.layers * case.small.micro_batches,
            "it is of all layers of all micro-batches", _HOST),
    Mistake("difference", lambda case: (
        case.small_seconds - right_seconds(replace(case.small, launch=0.0))) / (
            case.small.micro_batches * case.small.layers),
        "it is what was measured beyond the prediction", "That is the waiting alone: launch is "
        "kernels and waiting together."),
    Mistake("kernels_subtracted",
            lambda case: _launch(case) - _factor(case) * case.small.kernels,
            "the kernels are taken off", "The host starts kernels while the GPU runs others: the "
            "longer of the two is the layer."),
    Mistake("kernels_subtracted", lambda case: _launch(case) - case.small.kernels,
            "the kernels are taken off", "The host starts kernels while the GPU runs others: the "
            "longer of the two is the layer."),
    Mistake("whole_step", lambda case: case.small_seconds / (
        case.small.micro_batches * case.small.layers),
        "the whole step is counted as the host's", _HOST),
    Mistake("in_milliseconds", lambda case: 1e3 * _launch(case), "that is in milliseconds",
            "Return seconds.")]


@check("6.17")
def check_calibrate(calibrate: Callable, correct: Callable):
    """calibrate(large, large_seconds, small, small_seconds): (factor, launch) of machines that are
    made up, and of public runs. correct(step, factor, launch): the step on such a machine."""
    require_signature(calibrate, NAMES)
    require_signature(correct, ("step", *RESULTS))
    cases = [*made_up(), public_case()]
    kept = UnchangedInputs("calibrate", steps=[vars(step) for case in cases
                                               for step in (case.large, case.small)])
    answers = [require_numbers(calibrate(*case.arguments), RESULTS, case.name) for case in cases]
    kept.judge()
    for place, (name, mistakes, unit) in enumerate((("the factor of the GPU's seconds",
                                                     FACTOR_MISTAKES, ""),
                                                    ("launch", LAUNCH_MISTAKES, "s"))):
        numbers = [as_number(answer[place]) for answer in answers]
        for at, case in enumerate(cases):
            # Differences of seconds of which a tenth is left lose a digit: 1e-8, not 1e-9.
            judge_number(answers[at][place], right(case)[place],
                         common_cause(mistakes, cases, numbers, at), f"{case.name}: {name}", unit,
                         (_GPU, _HOST)[place], rel_tol=1e-8)
    _judge_corrected(correct)
    before, after = (_median_error(others(), *found) for found in ((1.0, 0.0), right(cases[-1])))
    return (f"right for {len(cases)} machines; two steps of 1B parameters bring the median error "
            f"of {len(others())} other runs from {before:.1f} to {after:.1f} %")


_SCALED = {"kernels": "the factor times the step's", "head": "the factor times the step's",
           "launch": "the launch that is given"}


def _judge_corrected(correct):
    """Every field of a corrected step."""
    for case in made_up():
        factor, launch = right(case)
        for step in (case.large, case.small):
            step = replace(step, launch=0.7 * launch)  # of the machine that was predicted
            kept = UnchangedInputs("correct", step=vars(step))
            got, want = correct(step, factor, launch), corrected(step, factor, launch)
            kept.judge()
            if not isinstance(got, GpuStep):
                raise Wrong(f"{case.name}: correct returned {kind_of(got)}, not a step",
                            "dataclasses.replace(step, kernels=…) is a step with other values.",
                            code="no_step")
            for name, value in vars(want).items():
                if name == "name":
                    continue
                judge_number(vars(got)[name], value, _corrections(step, name, factor, launch),
                             f"{case.name}: {name} of the corrected step", hint="It is "
                             f"{_SCALED.get(name, 'not corrected: it stays as it is')}.")


def _corrections(step, name, factor, launch) -> list[Cause]:
    """What may be wrong with a field of a corrected step."""
    before = vars(step)[name]
    if name not in _SCALED:
        return []
    found = [Cause("not_corrected", before, "it is the predicted one")]
    if name == "launch":
        return [*found, Cause("launch_scaled", launch * factor, "it is multiplied by the factor"),
                Cause("launch_scaled", before * factor,
                      "it is the predicted one times the factor"),
                Cause("launch_added", launch + before, "it is added to the predicted one")]
    return [*found, Cause("inverted", before / factor, "it is divided by the factor")]


def made_up() -> list[Case]:
    """Machines with another GPU and host than predicted, on which `large` waits for the GPU and
    `small` for the host."""
    rng = new_generator()
    found = []
    for number, factor in enumerate((1.5, 0.75, 1.1, rng.uniform(1.2, 3))):
        launch = rng.uniform(3e-3, 9e-3)
        large = GpuStep("large", rng.randint(8, 40), rng.randint(2, 8), 4 * launch / factor, 0.0,
                        rng.uniform(0.02, 0.1), rng.uniform(0.05, 0.3))
        small = replace(large, name="small", micro_batches=8 * large.micro_batches,
                        kernels=large.kernels / 8, head=large.head / 8)
        measured = [right_seconds(corrected(step, factor, launch)) for step in (large, small)]
        case = Case(f"machine {number + 1}", large, measured[0], small, measured[1])
        # what each case is for: its two steps wait for different parts
        assert factor * large.kernels > launch > factor * small.kernels
        found.append(case)
    return found


_LARGE, _SMALL = ("1B", 4, 16, 8), ("1B", 8, 1, 8)  # model, tensor, micro-batch, GPUs


def public_case() -> Case:
    """Two runs of 1B parameters on 8 H100s, predicted with constants of other code bases."""
    steps = [measured_step(*asked, calibrated=False) for asked in (_LARGE, _SMALL)]
    return Case("8 H100s", *steps[0], *steps[1])


def others(gpus: int = 16) -> list[GpuRun]:
    """The runs that `public_case` does not use."""
    used = {step.name for step in (public_case().large, public_case().small)}
    return [run for run in runs(gpus) if step_of(run).name not in used]


def _errors(found, factor, launch) -> list[float]:
    """In percent."""
    return [100 * (right_seconds(corrected(step_of(run, calibrated=False), factor, launch))
                   / run.seconds - 1) for run in found]


def _median_error(found, factor, launch) -> float:
    return median(map(abs, _errors(found, factor, launch)))


@shows("6.17")
def show_calibrated(calibrate: Callable) -> Table:
    """A table of the errors on public runs before and after they are corrected by the student's two
    numbers."""
    factor, launch = require_numbers(calibrate(*public_case().arguments), RESULTS, "calibrate")
    groups = {"1B, up to 16 GPUs": [run for run in others() if "1B" in run.job.name],
              "8B, up to 16 GPUs": [run for run in others() if "8B" in run.job.name],
              "both, 32 to 256 GPUs": [run for run in others(256) if run.gpus > 16]}
    chosen = {"nothing": (1.0, 0.0), "launch": (1.0, launch), "both": (factor, launch)}
    rows = [(name, len(found), *(
        f"{_median_error(found, *pair):.1f} / "
        f"{sorted(map(abs, _errors(found, *pair)))[int(0.9 * len(found))]:.0f}"
        for pair in chosen.values())) for name, found in groups.items()]
    return Table("Error of predicted seconds in percent: median / 90 % of the runs below",
                 ("corrected:", "runs", *chosen), rows, left=1,
                 note=f"By two steps of 1B on 8 H100s: the GPU's seconds times {factor:.2f}, and "
                      f"{1e3 * launch:.2f} ms to start a layer.")
