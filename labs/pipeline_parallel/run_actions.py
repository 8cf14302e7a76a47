"""Exercise 7.18: one rank runs its list of a schedule."""

from collections.abc import Callable
from itertools import chain
from statistics import median

import torch
import torch.distributed as dist

from labs.checks.guesses import guessed
from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import as_number
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.meters.metrics import Metric
from labs.meters.traffic import Traffic
from labs.meters.typical_step import require_typical
from labs.pictures.picture import Picture
from labs.pictures.schedules import DrawnSchedule, timelines
from labs.pictures.tables import Table
from labs.pipeline_parallel.measured_steps import (
    MeasuredStep,
    losses_by_runtime,
    measured_step,
    train_on_ranks,
)
from labs.pipeline_parallel.one_process import HIDDEN, Case, OneProcess, close, draw_micro_batches
from labs.pipeline_parallel.runner import PipelineRunner, make_links
from labs.pipeline_parallel.schedule_charts import KIND_OF
from labs.pipeline_parallel.stage_events import StageEvents
from labs.predictions.pipelines import Action, IllegalSchedule, Schedule, require_legal
from labs.predictions.pipelines.schedules import gpipe, interleaved, one_f_one_b
from labs.predictions.pipelines.simulate import simulate
from labs.words import counted

STEPS = 5
SGD = {"lr": 0.3, "momentum": 0.9}  # AdamW makes a difference of rounding as large as a gradient
HINTS = {"which is None": "Received tensors have no history: call requires_grad_() on the input of "
         "a stage before its forward, so that backward leaves its gradient in .grad.",
         "has sent the gradient": "Receive, compute and send in each action, in the order of the "
         "list. If your B sends nothing because the input of its stage has no gradient: a received "
         "tensor must require gradients before its forward.",
         "before": "Receive, compute and send in each action, in the order of the list.",
         "Mismatch in shape": "The gradient of one micro-batch meets the output of another: keep "
         "input and output by micro-batch and stage."}


@check("7.18", hints=HINTS)
def check_run_actions(run_actions):
    """run_actions(actions, stages, micro_batches, links): one rank's part of a step; the loss on
    the rank of the last stage."""
    for ranks in (2, 3, 4):
        on_ranks(_try_cases, run_actions, _cases(ranks), world_sizes=(ranks,))
    return (f"{counted(STEPS, 'step')} equal the reference's on 2, 3 and 4 ranks, with fewer "
            "micro-batches than stages and two stages on a rank, too; each message has b·s·h "
            "numbers, and no activation outlives its backward")


def _cases(ranks) -> list[Case]:
    if ranks == 2:
        return [Case("1F1B", one_f_one_b(2, 5), (3, 2), STEPS),
                Case("interleaved", interleaved(2, 4, 2), (2, 1, 1, 1), accumulates=True),
                Case("1F1B with one micro-batch", one_f_one_b(2, 1), (1, 1))]
    if ranks == 3:
        return [Case("GPipe with fewer micro-batches than stages", gpipe(3, 2), (1, 2, 1)),
                Case("1F1B", one_f_one_b(3, 7), (1, 2, 1))]
    return [Case("1F1B", one_f_one_b(4, 6), (2, 1, 1, 1), 2)]


def _try_cases(run_actions, cases):
    for case in cases:
        _try_case(run_actions, case)


def _try_case(run_actions, case):
    rank, model = dist.get_rank(), case.model()
    stages = case.stages(model, rank)
    reference = OneProcess(model, torch.optim.SGD, **SGD)
    optimizer = torch.optim.SGD(chain(*(stage.parameters() for stage in stages.values())), **SGD)
    where = f"{case.name} on {counted(dist.get_world_size(), 'rank')}"
    enough = _enough_bytes(case, model)
    for number in range((1 + case.accumulates) * case.steps):
        batches = draw_micro_batches(case.schedule.micro_batches, seed=number)
        # The invariant: whatever the order, a step's gradient is the sum over micro-batches of one
        # process, divided by all targets that count.
        reference.differentiate(batches)
        # New for each step: it records one run of the list.
        events = StageEvents(case.schedule, rank, stages)
        loss, traffic = _observed(run_actions, case, stages, batches, events)
        raise_on_all_ranks(_judge_traffic, traffic, case, batches, where)
        raise_on_all_ranks(_judge_numbers, loss, stages, reference, f"{where}, step {number + 1}")
        raise_on_all_ranks(events.judge_kept, enough)
        if not case.accumulates or number % 2:
            optimizer.step()
            optimizer.zero_grad()
            reference.update()


def _enough_bytes(case, model) -> int:
    """What our own runner's autograd keeps at the peak, and one forward more."""
    stages = case.stages(model, dist.get_rank())
    batches = draw_micro_batches(case.schedule.micro_batches, seed=0)
    record = PipelineRunner(case.schedule, stages).step(batches)
    growth = [after - before for before, after in
              zip([0, *record.in_flight], record.in_flight, strict=False)]
    # One forward more, because a right answer may run it before the last backward's variables are
    # gone.
    return record.peak + max(growth)


def _observed(run_actions: Callable, case, stages, batches, events) -> tuple[object, Traffic]:
    """What it returns and sends."""
    links = make_links(case.schedule, stages, batches)
    actions = case.schedule.ranks[links.rank]
    kept = UnchangedInputs("run_actions", micro_batches=batches)
    versions = [(stage.names()[name], parameter, parameter._version)
                for stage in stages.values() for name, parameter in stage.named_parameters()]
    with Traffic() as traffic, events.recorded():
        loss = run_actions(actions, stages, batches, links)
    events.finish()
    _require_messages(links, events)
    raise_on_all_ranks(events.judge_order)
    raise_on_all_ranks(kept.judge)
    raise_on_all_ranks(_judge_parameters, versions)
    # Last: finish waits for receivers, and a rank that raises above receives nothing more.
    links.finish()
    return loss, traffic


def _require_messages(links, events):
    """Raises Wrong on this rank alone where a message is missing: another rank may wait for it, and
    so never meets this one."""
    try:
        links.require_complete()
    except ValueError as error:
        events.judge_order()
        raise Wrong(str(error), "Every action receives what its stage needs, computes, and sends "
                    "its result if there is a stage to send it to.",
                    code="illegal_messages") from None


def _judge_parameters(versions):
    # The optimizer's step is the training loop's: here it would come twice.
    for name, parameter, version in versions:
        if parameter._version != version:
            raise Wrong(f"rank {dist.get_rank()}: run_actions has changed parameter {name!r}",
                        "Only gradients are computed here; the training loop steps the optimizer.",
                        code="parameters_changed")


def _judge_traffic(traffic, case, batches, where):
    rank = dist.get_rank()
    # A pipeline needs messages between neighbours alone; a broadcast or all-gather shares what
    # belongs to one rank, or every rank would have the whole model.
    for call in traffic.calls:
        if call.kind not in ("send", "recv"):
            raise Wrong(f"{where}: rank {rank} calls {call.kind} of {call.elements:,} numbers",
                        "links.receive and links.send are all that the ranks exchange.",
                        code="wrong_collective")
    # One message of b·s·h for each action that has another stage to send to.
    expected = [batches[action.micro_batch]["input_ids"].numel() * HIDDEN
                for action in case.schedule.ranks[rank] if _is_sent(case, action)]
    # Sorted below: the links have judged the order already.
    sent = [call.elements for call in traffic.of("send")]
    if sorted(sent) != sorted(expected):
        raise Wrong(f"{where}: rank {rank} sends {counted(len(sent), 'message')} of {sum(sent):,} "
                    f"numbers; its list needs {len(expected)} of {sum(expected):,}, b·s·h each",
                    code="wrong_traffic")


def _is_sent(case, action) -> bool:
    step = 1 if action.kind == "F" else -1
    target = Action(action.kind, action.micro_batch, action.stage + step)
    return target in case.schedule.everything


def _judge_numbers(loss, stages, reference, where):
    rank = dist.get_rank()
    for stage in stages.values():
        names = stage.names()
        for name, parameter in stage.named_parameters():
            _judge_gradient(parameter, names[name], reference, f"{where}: rank {rank}, parameter "
                            f"{names[name]!r}")
    if any(stage.is_last for stage in stages.values()):
        _judge_loss(loss, reference, f"{where}: rank {rank}, which has the last stage,")


def _judge_gradient(parameter, name, reference, who):
    if parameter.grad is None:
        raise Wrong(f"{who}: it has no gradient", "Backward adds gradients up in .grad of the "
                    "stage's parameters: output.backward(gradient of the output).",
                    code="gradient_missing")
    if close(parameter.grad, reference.gradients[name]):
        return
    code, sentence, hint = _mistake(parameter.grad, name, reference)
    raise Wrong(f"{who}: its gradient is {sentence}", hint, code=code)


def _mistake(gradient, name, reference) -> tuple[str, str, str]:
    """(code, what explains a gradient, hint)."""
    # With as many targets in each micro-batch several of these are the same number:
    # that is why the check's micro-batches differ.
    number, total = len(reference.counts), sum(reference.counts)
    means = [1 / count for count in reference.counts]
    causes = [
        ("unweighted_mean", [mean / number for mean in means],
         "the mean of the micro-batches' means: a micro-batch "
         "with few targets counts as much as one with many", "Divide each sum of losses by the "
         "number of targets in all micro-batches."),
        ("counts_ignored_targets", [1 / reference.tokens] * number,
         "that of the sum of the losses divided by the number of "
         "all targets, also of those that are -100", "Count the targets that are not -100."),
        ("counts_own_targets", [1 / tokens for tokens in reference.tokens_of_each],
         "that of the sum of the micro-batches' losses, each divided by its own number of targets, "
         "also of those that are -100", "Divide each sum of losses by the number of targets in all "
         "micro-batches, without those that are -100."),
        ("sum_not_mean", [1.0] * number, "that of the sum of the losses, not of the mean",
         "Divide by the number of targets in all micro-batches."),
        ("sum_of_means", means, "the sum of the micro-batches' means",
         "Divide each sum of losses by the number of targets in all micro-batches."),
        ("mean_twice", [1 / total / number] * number,
         f"{number} times too small: the loss is scaled twice",
         "The sum of all losses divided by all targets is a mean already."),
        ("last_micro_batch_only", [0.0] * (number - 1) + [1 / total],
         "that of the last micro-batch alone",
         "Gradients of all micro-batches add up in .grad.")]
    for code, factors, sentence, hint in causes:
        if close(gradient, reference.with_factors(factors)[name]):
            return code, sentence, hint
    # `before`: the gradients of the previous step, in the case that accumulates over two.
    if close(gradient, reference.gradients[name] - reference.before[name]):
        return ("gradients_overwritten", "without what was there before the step",
                "Gradients accumulate: add to .grad.")
    difference = (gradient - reference.gradients[name]).abs().max().item()
    return ("wrong_gradient", f"off by up to {difference:.2g} from the reference's",
            "Is each output's backward run with the gradient that was received for it?")


def _judge_loss(loss, reference, who):
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        raise Wrong(f"{who} returns a loss with its graph", "loss.item() or loss.detach(): a graph "
                    "keeps what it has computed in memory.", code="graph_kept")
    found = as_number(loss)
    if found is None:
        raise Wrong(f"{who} returns {kind_of(loss)}, not the loss", code="wrong_type")
    if abs(found - reference.loss) > 1e-5 * reference.loss:
        raise Wrong(f"{who} returns the loss {found:.5f}; the reference's is {reference.loss:.5f}",
                    "The mean over all targets that count, of all micro-batches.",
                    code="wrong_loss")


MB = 1e6


@shows("7.18")
def show_training(run_actions: Callable, schedule: Callable, ranks: int = 4,
                  micro_batches: int = 6) -> Table:
    """Trains a small Llama by the student's run_actions: what each rank has and sends, and the
    losses beside those of one process."""
    done, alone = train_on_ranks(run_actions, _schedule(schedule, ranks, micro_batches))
    rows = [(f"rank {rank}", each.layers, f"{each.parameters / 1e6:.2f} million", each.messages,
             f"{each.bytes / MB:.2f} MB") for rank, each in enumerate(done)]
    losses = next((each.losses for each in done if each.losses), [])
    off = max((abs(a - b) for a, b in zip(losses, alone, strict=True)), default=float("nan"))
    return Table(f"{ranks} ranks, {micro_batches} micro-batches",
                 ("", "layers", "parameters", "messages sent a step", "bytes sent a step"), rows,
                 note=f"Loss {losses[0]:.4f} before the first step, {losses[-1]:.4f} before the "
                      f"last of {len(losses)}; one process differs by {off:.0e} at most."
                      + guess_words("7.18", "the mean loss of 10 targets at 4 and 90 at 2",
                                 (10 * 4 + 90 * 2) / (10 + 90)))


def guess_words(key, what, is_right) -> str:
    """A sentence for a note below a table, or nothing where there is no guess."""
    guess = guessed(key)
    return "" if guess is None else f" Your guess of {what}: {guess:g}; it is {is_right:.3g}."


@shows("A schedule on ranks")
def show_measured(schedule: Callable, ranks: int = 4, micro_batches: int = 6,
                  chunks: int = 1) -> Picture:
    """Runs what a function of 7.14 to 7.17 returns on real ranks, and draws the measured timeline
    below the one that is simulated from the measured times of its actions and messages."""
    chosen = _schedule(schedule, ranks, micro_batches, chunks)
    kind = KIND_OF.get(schedule.__name__)
    bubble = kind and kind.bubble(ranks, micro_batches, chunks)
    return draw_measured(measured_step(chosen), schedule.__name__, bubble)


def _schedule(function, ranks, micro_batches, chunks=1) -> Schedule:
    """Of the student's function. Raises Wrong, before a rank is started, where it is illegal."""
    sizes = (ranks, micro_batches, chunks) if chunks > 1 else (ranks, micro_batches)
    try:
        lists = function(*sizes)
        return require_legal(lists if isinstance(lists, Schedule) else
                             Schedule.from_lists(lists, micro_batches, chunks))
    except IllegalSchedule as error:
        raise Wrong(f"{function.__name__}{sizes}: {error}", "Nothing was sent: a schedule is "
                    "judged before it runs.", code=error.code) from None


def draw_measured(step: MeasuredStep, name: str, bubble: float | None = None) -> Picture:
    """Draws a measured step below its simulation. bubble: the share that the formula gives. Raises
    NotTypical where the step is far from the median of those measured."""
    if step.lengths:
        require_typical({name: (min(step.lengths), median(step.lengths))}, "this cell")
    simulated = simulate(step.schedule, step.times)
    expected = [held / MB for held in simulated.peak_bytes(step.activation_bytes, step.kept)]
    peaks = [peak / MB for peak in step.peaks]
    return timelines([
        DrawnSchedule(f"{name}, simulated", simulated, unit="seconds", bubble=bubble,
                      held=expected, held_unit="MB"),
        DrawnSchedule(f"{name}, on {len(step.schedule.ranks)} ranks", step.timeline,
                      unit="seconds", bubble=bubble, held=peaks, peaks=expected, held_unit="MB")],
        [Metric(f"{name}: bubble", step.timeline.bubble(), "", bubble),
         *(Metric(f"{name}: activations in flight on rank {rank}", peak, "MB", predicted)
           for rank, (peak, predicted) in enumerate(zip(peaks, expected, strict=True)))])


@shows("The comparison of runtimes")
def show_runtimes(*functions: Callable, micro_batches: int = 4) -> Table:
    """Trains the same small Llama on 2 ranks by what these functions return, in our runner and in
    torch's runtime, and by torch's own schedules."""
    schedules = {function.__name__: _schedule(function, 2, micro_batches) for function in functions}
    losses = losses_by_runtime(schedules, ranks=2, micro_batches=micro_batches)
    first = next(iter(losses.values()))
    rows = [(name, *(f"{loss:.6f}" for loss in found),
             f"{max(abs(a - b) for a, b in zip(found, first, strict=True)):.0e}")
            for name, found in losses.items()]
    return Table("Losses of the same Llama on 2 ranks",
                 ("schedule and runtime", *(f"step {number + 1}" for number in range(len(first))),
                  "difference"), rows)
