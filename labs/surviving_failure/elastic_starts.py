"""Exercise 8.6: what one (re)start of elastic.py must do."""

import re
from dataclasses import dataclass

import torch

from labs.checks.job_end import judge_left, left_alone
from labs.checks.verdicts import Wrong
from labs.surviving_failure.elastic_crashes import Start, key_of
from labs.surviving_failure.forked_starts import Started
from labs.words import counted, format_distinct, listed
from labs.workers import worker

_SAMPLES = "The batches of the steps that are done are drawn, too, "
_HALF = ("An incomplete checkpoint must not be found: write it under another name, and let "
         "rank 0 rename it when all ranks have written.")
_SAME_CALLS = ("All ranks call the same collectives: dcp.save, dcp.load, get_state_dict and "
               "broadcast_object_list are collectives, and so they stand in no `if rank == 0`.")


@dataclass(frozen=True)
class Plan:
    """The training that is asked for. samples: of each step, of all ranks together."""

    steps: int
    every: int
    learning_rate: float
    samples: list[torch.Tensor]

    def step_of(self, key: str, rank: int, ranks: int) -> int | None:
        """The step in which this rank trains on the samples with this key."""
        return next((step for step, rows in enumerate(self.samples)
                     if key_of(rows[rank::ranks]) == key), None)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.learning_rate * (1 - step / self.steps)


def name_of(start: Start) -> str:
    """The ranks of a start in words."""
    return counted(start.ranks, "rank")


def judge_start(started: Started, plan: Plan, killed_at: int, allowed: set[int], when: str,
                losses: dict[int, float] | None = None, rounding: float = 0.0,
                alone: Started | None = None) -> int:
    """Raises Wrong unless all ranks continued from the same one of the `allowed` steps and trained
    as planned, to the end or to their kill; returns that step. killed_at: how many steps were done
    when a rank was killed before. losses: those that they must have noted. alone: the run that
    nobody killed, on as many ranks."""
    restart = f"{when}; started again on {name_of(started.start)}" if killed_at else when
    if not all(started.batches):
        _judge_end(started, restart, killed_at)
    # first: an error or a hang may be what comes of another beginning
    # Invariant: all ranks continue from the same checkpoint, the newest complete one. Catches ranks
    # that each look into the folder by themselves: on a network file system they may see different
    # ones.
    firsts = _first_steps(started, plan, restart)
    at = _judge_first(started, plan, firsts, killed_at, allowed, restart)
    if len(started.steps) > plan.steps - at:  # it may go on for ever
        _judge_noted(started, plan, at, restart)
    _judge_end(started, restart, killed_at)
    _judge_noted(started, plan, at, restart)
    _judge_batches(started, plan, at, restart)
    _judge_rates(started, plan, at, restart)
    if losses:
        _judge_losses(started, losses, rounding, restart, alone)
    return at


def _judge_end(started, when, killed_at):
    if started.killed:
        return
    if started.code is None:
        waits = [f"rank {rank} {where}" for rank, where in enumerate(started.waiting) if where]
        raise Wrong(f"{when}: the ranks wait for each other for ever"
                    + (f": {'; '.join(waits)}" if waits else ""), _SAME_CALLS, code="never_ends")
    if started.code:
        rank, error = _first_error(started)
        if error is None:
            raise Wrong(f"{when}: rank {rank} ended with exit code {started.codes[rank]}",
                        code="rank_failed")
        kind, message, line = error
        if kind == "NotImplementedError" and message.startswith("Exercise"):
            raise NotImplementedError(message)
        where = f"{when}: rank {rank}, line {line} of the script"
        # Invariant: no rank ends while another one still needs it.
        ended = [other for other, code in enumerate(started.codes) if code == 0]
        if ended and worker.lost_connection(message):
            raise left_alone(where, started.waiting[rank], ended, _SAME_CALLS)
        hint = _HALF if killed_at and "while it saved" in when else ""
        raise Wrong(f"{where}: {kind}: {_first_line(message)}", hint, code=f"raised_{kind}")
    judge_left(started, when, "job")


def _first_error(started):
    """(rank, error) of a rank that failed by itself; others lost their connection to it."""
    failed = [rank for rank, code in enumerate(started.codes) if code]
    alone = [rank for rank in failed if started.errors[rank]
             and not worker.lost_connection(started.errors[rank][1])]
    rank = (alone or failed)[0]
    return rank, started.errors[rank]


def _first_line(message) -> str:
    """The first line; of DCP's, which begins with the ranks that failed, the first that names an
    error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    return next(iter(named + lines), "")[:200]


def _first_steps(started, plan, when) -> list[int]:
    """The step on whose samples each rank trains first."""
    found = []
    for rank, keys in enumerate(started.batches):
        if not keys:
            raise Wrong(f"{when}: rank {rank} does not train",
                        "It continues until options.steps steps are done.", code="does_not_train")
        step = plan.step_of(keys[0], rank, started.start.ranks)
        if step is None:
            raise Wrong(f"{when}: rank {rank} trains on samples that are its own in no step",
                        "`batches` gives each rank its samples.", code="wrong_inputs")
        found.append(step)
    return found


def _judge_first(started, plan, firsts, killed_at, allowed, when) -> int:
    if len(set(firsts)) > 1:
        saw = (", to which the newest one was not visible yet, as on a network file system"
               if started.start.stale else "")
        raise Wrong(f"{when}: rank 0 continues with the samples of step {firsts[0]}, rank 1{saw}, "
                    f"with those of step {firsts[1]}",
                    "One rank decides which checkpoint is loaded, and tells the others: "
                    "dist.broadcast_object_list.", code="ranks_resume_apart")
    at, noted = firsts[0], started.steps[0].step if started.steps else None
    if not killed_at:
        if at:
            raise Wrong(f"{when}: the first step trains on the samples of step {at}",
                        "Without a checkpoint it begins with the first batch.",
                        code="wrong_first_step")
        return at
    if at == 0 and noted == 0 and 0 not in allowed:
        hint = ("The old checkpoint stays until the new one is complete."
                if "while it saved" in when else
                "Is a checkpoint found, and does `train` call resume()?")
        raise Wrong(f"{when}: it begins with step 0 again, and all {killed_at} steps that were "
                    "done are lost", hint, code="starts_again")
    # The noted number comes from the checkpoint, the samples from the data: they disagree where the
    # batches that are done were not skipped.
    if noted is not None and noted != at:
        raise Wrong(f"{when}: the step that is noted as step {noted} trains on the samples of step "
                    f"{at}", _SAMPLES + "and left out: islice(batches, done, None).",
                    code="samples_misplaced")
    if at not in allowed:
        _raise_far(plan, at, killed_at, allowed, when)
    return at


def _raise_far(plan, at, killed_at, allowed, when):
    newest = max(allowed)
    if at > killed_at or at > newest:
        raise Wrong(f"{when}: it continues with step {at}, and the newest checkpoint has {newest} "
                    "steps: a step is skipped", "After `done` steps, step number `done` is next: "
                    "they are counted from 0.", code="step_left_out")
    if newest - at < plan.every:
        raise Wrong(f"{when}: it continues with step {at}, and the newest checkpoint has {newest} "
                    "steps: a step that is in it is done twice", "After `done` steps, step number "
                    "`done` is next: they are counted from 0.", code="step_repeated")
    raise Wrong(f"{when}: it continues with step {at}, and the checkpoint of {newest} steps was "
                "complete", "The newest complete one. As text, step_9 is larger than step_12.",
                code="older_checkpoint")


def _judge_noted(started, plan, at, when):
    """Every step once, in order, to the end or to the kill."""
    noted = [step.step for step in started.steps]
    if noted != list(range(at, at + len(noted))):
        raise Wrong(f"{when}: the steps that are noted are {listed(noted)}",
                    "Each step once, in order: enumerate(..., start=done).",
                    code="wrong_steps_noted")
    if (started.killed is None or len(noted) > plan.steps - at) and noted[-1:] != [plan.steps - 1]:
        last = noted[-1] if noted else "none"
        endless = ", and it still ran" if started.code is None else ""
        raise Wrong(f"{when}: the last step that is noted is {last}{endless}; of --steps "
                    f"{plan.steps} it is {plan.steps - 1}", "options.steps is the number of all "
                    "steps, those before a restart among them.", code="wrong_last_step")


def _judge_batches(started, plan, at, when):
    ranks = started.start.ranks
    for rank, keys in enumerate(started.batches):
        for step, key in enumerate(keys, start=at):
            rows = plan.samples[step][rank::ranks] if step < plan.steps else None
            if rows is not None and key == key_of(rows):
                continue
            other = plan.step_of(key, rank, ranks)
            what = f"those of step {other}" if other is not None else "no step's of this rank"
            raise Wrong(f"{when}: rank {rank}, step {step}: the samples are {what}",
                        _SAMPLES + "left out once, and then follow each other.",
                        code="wrong_samples")


def _judge_rates(started, plan, at, when):
    # Invariant: the learning rate of each step is that of the uninterrupted schedule. Catches a
    # scheduler that starts again at step 0.
    for rank, rates in enumerate(started.rates):
        for step, rate in enumerate(rates, start=at):
            want = plan.rate(step)
            if abs(rate - want) > 1e-6 * plan.learning_rate:
                other = round((1 - rate / plan.learning_rate) * plan.steps)
                which = f", as in step {other}" if other != step else ""
                is_, should_be = format_distinct(rate, want)
                raise Wrong(f"{when}: rank {rank}, step {step}: the learning rate is {is_}{which}, "
                            f"not {should_be}",
                            "The schedule has a state too: scheduler.state_dict(). The learning "
                            "rate itself stands in the optimizer's.", code="wrong_learning_rate")


def _judge_losses(started, losses, rounding, when, alone):
    at = started.steps[0].step if started.steps else 0
    for step in started.steps:
        # Invariant: losses equal those without a kill. Which step is wrong first tells what was not
        # loaded: the first one shows parameters and random numbers, the second one the moments.
        want = losses[step.step]
        if abs(step.loss - want) <= rounding * max(1.0, abs(want)):
            continue
        is_, should_be = format_distinct(step.loss, want, digits=5)
        sentence = (f"{when}: the loss of step {step.step} is {is_}, and {should_be} where nobody "
                    "is killed")
        if step.step > at:
            raise Wrong(f"{sentence}; that of the first step, {at}, was right: the parameters are "
                        "loaded, but not all of the optimizer's state",
                        "Adam's moments and their step count: the second step shows them.",
                        code="optimizer_state_missing")
        if alone and _draws_others(started, alone, at):
            raise Wrong(f"{sentence}; without dropout it was right: the random numbers are others",
                        "Save the state of each rank's generator, or set it in each step from the "
                        "step's and the rank's number: then there is nothing to save.",
                        code="other_random_numbers")
        raise Wrong(f"{sentence}: the parameters are not those of step {at}",
                    _HALF if "while it saved" in when else
                    "What was saved must be loaded into the module on every rank: set_state_dict, "
                    "or module.load_state_dict.", code="parameters_not_loaded")


def _draws_others(started, alone, step) -> bool:
    """Whether a rank begins its first step with other random numbers than where nobody is killed.
    """
    return any(own[:1] != same[step:step + 1] for own, same in
               zip(started.random_states, alone.random_states, strict=True))
