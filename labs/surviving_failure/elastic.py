"""Exercise 8.6: elastic.py, whose ranks are killed and started again."""

import random
from collections.abc import Sequence
from itertools import islice

import torch

from labs.checks.generator import new_generator
from labs.checks.job_end import judge_left
from labs.checks.scripts.files import waits_for
from labs.checks.scripts.forked import options
from labs.checks.verdicts import Wrong, check
from labs.surviving_failure import forked_starts
from labs.surviving_failure.elastic_crashes import Crash, Start
from labs.surviving_failure.elastic_job import CONTEXT, global_batches
from labs.surviving_failure.elastic_starts import Plan, judge_start, name_of
from labs.surviving_failure.forked_starts import Started
from labs.training import data, models
from labs.words import listed
from labs.workers.launcher import launch
from labs.workers.progress import status

STEPS, EVERY = 17, 3
SIZES = {"steps": STEPS, "every": EVERY, "batch": 8, "samples": 40, "layers": 1, "hidden": 32,
         "seed": 3}
LEARNING_RATE = 1e-3
ROUNDING = 2e-4  # of a loss, on another number of ranks: float32 sums in another order
DROPOUT = 0.1
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "Missing key in checkpoint": "dcp.load wants every key of the dictionary that it fills in the "
                                 "checkpoint: use the same keys as when it was saved. With another "
                                 "number of ranks there is nothing for a new rank alone.",
    "No such file or directory": "Who made the folder, and who renamed it before?",
    "Directory not empty": "os.replace does not replace a folder with files in it: is this step "
                           "saved twice, or the same name used again?"}


@check("8.6", _HINTS)
def check_elastic(script: str = "elastic.py"):
    """Ranks of the script are killed, in steps and while they save, and started again, also on
    another number of ranks: it must resume from the newest complete checkpoint, the same on all
    ranks, and its losses must be those of the uninterrupted run."""
    if waits := waits_for("8.6", script):
        return waits
    rng = new_generator()
    with status("2 ranks, nobody is killed"):
        alone = _run(script, DROPOUT, [Start(2)])
        plan = Plan(STEPS, EVERY, LEARNING_RATE, _samples())
        # First a run without kills: a script that trains on wrong samples would fail every later
        # comparison.
        judge_start(alone[0], plan, 0, {0}, "2 ranks")
        _judge_saves(alone[0])
        _judge_random_states(alone[0])
    losses = {step.step: step.loss for step in alone[0].steps}
    with status("2 ranks, then 1, then 2"):
        _judge_changing(script, plan, rng)
    with status("killed while it saves"):
        again = _judge_kills(script, plan, alone[0], losses, rng)
    return (f"killed 5 times, in steps and while it saved, and each time it resumed: from "
            f"the newest complete checkpoint, on 2 and on 1 rank; of {STEPS} steps at most {again} "
            "were run again after a kill; the losses are those of the uninterrupted run, on as "
            "many ranks to the last bit")


def _run(script, dropout, starts) -> list[Started]:
    return forked_starts.run_starts(script, [*options(SIZES), "--dropout", dropout], starts)


def _samples() -> list[torch.Tensor]:
    """The samples of each step, of all ranks together."""
    windows = data.windows(SIZES["samples"], CONTEXT, SIZES["seed"])[:, :-1]
    order = global_batches(SIZES["samples"], SIZES["batch"], SIZES["seed"])
    return [windows[batch] for batch in islice(order, STEPS)]


def _judge_saves(started: Started):
    """A checkpoint after every k steps: no more, no less, and no file that two ranks write."""
    saved = sorted({done for calls in started.calls for done, _, _ in calls})
    wanted = list(range(EVERY, STEPS + 1, EVERY))
    if not saved:
        raise Wrong(f"no file was written to options.checkpoints in {STEPS} steps",
                    "save(...) after every options.every steps.", code="nothing_saved")
    # Invariant: a checkpoint after every EVERY steps, so that a kill costs at most EVERY steps.
    if missing := [step for step in wanted if step not in saved]:
        raise Wrong(f"with --every {EVERY} files were written after {listed(saved)} of {STEPS} "
                    f"steps, and none after {missing[0]}",
                    "A kill loses all steps since the last checkpoint.", code="saved_too_seldom")
    if more := [step for step in saved if step not in [*wanted, STEPS]]:
        raise Wrong(f"with --every {EVERY} files were written after {more[0]} steps, too",
                    "A checkpoint costs time: one after every options.every steps.",
                    code="saved_too_often")
    for done in saved:
        # Invariant: no file is written by two ranks. Each would overwrite the other's shards.
        of_ranks = [{path for at, kind, path in calls if at == done and kind == "write"}
                    for calls in started.calls]
        if both := sorted(set.intersection(*of_ranks)):
            raise Wrong(f"after {done} steps ranks 0 and 1 both write {both[0]}: the file is a "
                        "mixture, or that of the rank that was last",
                        "A file for each rank, as dcp.save does it, or rank 0 alone.",
                        code="same_file")


def _judge_random_states(started: Started):
    """One seed for all steps makes a restart exact, too, but dropout then drops the same places."""
    for rank, keys in enumerate(started.random_states):
        for step, key in enumerate(keys):
            if (first := keys.index(key)) < step:
                raise Wrong(f"rank {rank}: steps {first} and {step} begin with the same random "
                            "numbers: dropout drops the same activations in both",
                            "Each step has a seed of its own, which follows from its number.",
                            code="same_random_numbers")


def _judge_changing(script, plan, rng: random.Random):
    """2 -> 1 -> 2 ranks; at last rank 1 does not see the newest checkpoint yet."""
    first = rng.randrange(EVERY + 1, 2 * EVERY)  # not a multiple: some steps are run again
    second = rng.randrange(4 * EVERY + 1, 5 * EVERY)  # step_12 is newer than step_9, not as text
    starts = [Start(2, Crash(rng.randrange(2), first)), Start(1, Crash(0, second - EVERY)),
              Start(2, stale=True)]
    # Without dropout, because random masks on one rank could not equal those on two.
    found = _run(script, 0.0, starts)
    # Losses on other numbers of ranks are compared with one process that sees all samples of a
    # step.
    [losses] = launch(_reference, plan.samples, ranks=1, quiet=True)
    _judge_all(found, starts, plan, dict(enumerate(losses)), ROUNDING)


def _reference(samples) -> list[float]:
    """The losses of one process that trains on all samples of each step."""
    torch.set_num_threads(1)
    model = models.Decoder(SIZES["layers"], SIZES["hidden"], 0.0, SIZES["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, STEPS)
    losses = []
    for rows in samples:
        loss = model(rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _judge_kills(script, plan, alone, losses, rng) -> int:
    """Killed in two saves and in a step. Returns the most steps that were run again."""
    calls = [sum(done == EVERY for done, _, _ in calls) for calls in alone.calls]
    # The first kill is at the last call of a save on rank 0, which is usually the rename that makes
    # the checkpoint visible; the second in the first save after the restart, at any call.
    own = 1 if calls[1] else 0
    first = Crash(0, save=1, call=calls[0] - 1) if calls[0] else Crash(1, save=1, call=0)
    starts = [Start(2, first), Start(2, Crash(own, save=0, call=rng.randrange(calls[own]))),
              Start(2, Crash(rng.randrange(2), EVERY + rng.randrange(1, EVERY))), Start(2)]
    return _judge_all(_run(script, DROPOUT, starts), starts, plan, losses, 0.0, alone)


def _judge_all(found: Sequence[Started], starts, plan, losses, rounding, alone=None) -> int:
    """Judges one start after the other; returns the most steps that were run again."""
    allowed, when, again, killed_at = {0}, f"{name_of(starts[0])}", 0, 0
    for started in found:
        at = judge_start(started, plan, killed_at, allowed, when, losses, rounding, alone)
        again = max(again, killed_at - at)
        if started.killed:
            allowed, killed_at, when = _after(started, at)
    # A start that is not killed is the last: the step in which it was to be killed never came.
    if len(found) < len(starts) and found[-1].code == 0:
        raise Wrong(f"{when}: it ended before the step in which it was to be killed next",
                    "All steps up to options.steps are run, one after the other.",
                    code="ended_too_early")
    judge_left(found[-1], when, "job")
    return again


def _after(started: Started, at: int) -> tuple[set[int], int, str]:
    """(the steps from which the next start may continue, the number of steps that were done, in
    words) after a kill."""
    rank, begun = started.killed
    done = at + begun
    if started.start.crash.save is None:
        return {done // EVERY * EVERY}, done, f"rank {rank} was killed after {done} steps"
    return ({done - EVERY, done}, done,
            f"rank {rank} was killed while it saved, after {done} steps")
