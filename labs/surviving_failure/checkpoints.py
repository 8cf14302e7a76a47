"""Exercise 8.4: checkpoints of several ranks of which the newest valid one is found, whatever
happened to the others."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from labs.checks.generator import new_generator
from labs.checks.numbers import require_several
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.faults.kill_rank import kill_rank
from labs.pictures.tables import Table
from labs.surviving_failure import crash_series
from labs.surviving_failure.damage import DAMAGES, STEPS, Damage
from labs.surviving_failure.file_calls import recorded
from labs.surviving_failure.scaffold import MANIFEST, shard_file, step_folder
from labs.workers import processes

SIZE = 50_000  # float32 elements of a rank's tensor
KILLS = 6
SLOW = 0.4  # seconds that one rank needs longer than the others


@check("8.4")
def check_checkpoints(save_checkpoint: Callable, newest_checkpoint: Callable):
    """save_checkpoint(folder, step, state, group) on every rank, with a state of its own;
    newest_checkpoint(folder) -> (path of the newest valid one or None, {name: what is wrong})."""
    with processes.temporary_folder() as temporary:
        folder = Path(temporary, "saved")
        folder.mkdir()
        on_ranks(_save_all, save_checkpoint, folder, world_sizes=(2,))
        for damage in DAMAGES:
            _judge_damage(newest_checkpoint, folder, damage)
        on_ranks(_save_in_a_group, save_checkpoint, newest_checkpoint, Path(temporary, "group"),
                 world_sizes=(3,))
        on_ranks(_save_slowly, save_checkpoint, newest_checkpoint, folder, world_sizes=(2,))
        _judge_empty(newest_checkpoint, Path(temporary, "empty"))
        _judge_kills(save_checkpoint, newest_checkpoint, Path(temporary, "kills"))
    return (f"the newest valid checkpoint is found and each bad one named in {len(DAMAGES)} cases "
            f"of damage, and {KILLS} kills of a job of 2 ranks while it saved lost nothing")


def state_of(step: int, rank: int, size: int = SIZE) -> dict:
    """What a rank saves: another one for each step and each rank."""
    return {"step": step, "weight": torch.arange(size) * 1e-3 + 1000 * step + 10 * rank}  # (size,)


def _save_all(save_checkpoint, folder):
    for step in STEPS:
        with recorded() as calls:
            save_checkpoint(folder, step, state_of(step, dist.get_rank()), dist.group.WORLD)
        raise_on_all_ranks(_judge_saved, folder, step)
        _judge_synced(folder, step, calls)


def _save_in_a_group(save_checkpoint, newest_checkpoint, folder):
    """Ranks 1 and 2 of three are the job; rank 0 has nothing to do with it."""
    # All ranks call new_group, members or not. Here a rank's number in the group is not its own.
    group = dist.new_group([1, 2])
    if dist.get_rank():
        save_checkpoint(folder, 1, state_of(1, dist.get_rank(group)), group)
    raise_on_all_ranks(_judge_group, newest_checkpoint, folder)


def _judge_group(newest_checkpoint, folder):
    dist.barrier()  # rank 0 has not waited for the others
    when = "where the group is ranks 1 and 2 of three"
    path, problems = _found(newest_checkpoint, folder, when)
    # dist.get_rank() without the group is another number
    if path is None:
        raise Wrong(f"{when}, no valid checkpoint is found: {'; '.join(problems.values())}",
                    "dist.get_rank(group) is the rank in the group.", code="not_found")
    for rank in range(2):
        file = shard_file(path, rank)
        if not file.is_file() or not _is_of(torch.load(file), 1, rank):
            raise Wrong(f"{when}, {file.name} is not that of the group's rank {rank}",
                        "dist.get_rank(group) is the rank in the group.", code="wrong_rank")


def _save_slowly(save_checkpoint, newest_checkpoint, folder):
    raise_on_all_ranks(_judge_slow, save_checkpoint, newest_checkpoint, folder)


def _judge_saved(folder, step):
    """This rank's file has its own state, and nothing else; the older steps are still there."""
    dist.barrier()
    rank, path = dist.get_rank(), step_folder(folder, step)
    file = shard_file(path, rank)
    # Invariant: each rank's file has the state of that rank, and no other. Catches one rank that
    # writes for all, and ranks that overwrite one file.
    if not file.is_file():
        raise Wrong(f"step {step}: there is no {path.name}/{file.name}: the state of rank {rank} "
                    "is not saved", "Every rank writes its own part.", code="shards_missing")
    if not (path / MANIFEST).is_file():
        raise Wrong(f"step {step}: there is no {path.name}/{MANIFEST}", code="manifest_missing")
    try:
        found = torch.load(file)
    except Exception as error:
        raise Wrong(f"step {step}: {file.name} cannot be loaded by torch.load: "
                    f"{str(error).splitlines()[0][:100]}", "lab.to_bytes(state)",
                    code="unreadable_file") from None
    want = state_of(step, rank)
    if not isinstance(found, dict) or found.keys() != want.keys() or not all(
            torch.equal(torch.as_tensor(found[name]), torch.as_tensor(want[name]))
            for name in want):
        other = next((other for other in range(dist.get_world_size())
                      if _is_of(found, step, other)), None)
        whose = f": it is that of rank {other}" if other is not None else ""
        raise Wrong(f"step {step}: {file.name} does not hold the state of rank {rank}{whose}",
                    code="state_of_another_rank" if whose else "wrong_state")
    if file.stat().st_size > 1.5 * want["weight"].nbytes:
        raise Wrong(f"step {step}: {file.name} has {file.stat().st_size:,} bytes, more than the "
                    "rank's own state", "Each rank writes its own part, and no other.",
                    code="saves_others_shards")
    # Invariant: older steps stay. raise_on_all_ranks gathers after this, so no rank saves the next
    # step before all have looked.
    if gone := [old for old in STEPS if old < step and not step_folder(folder, old).exists()]:
        raise Wrong(f"when step {step} is saved, step_{gone[0]} is gone",
                    "Nothing is removed here: the new one may turn out to be damaged.",
                    code="removes_old")


def _judge_synced(folder, step, calls):
    """A machine that loses its power right after the save has lost nothing of it."""
    safe, path = [None] * dist.get_world_size(), step_folder(folder, step)
    mine = {os.path.basename(call.to or call.path) for call in calls}
    dist.all_gather_object(safe, mine)
    # A file may be synced by any rank, so the names are gathered first.
    for name in (*(shard_file(path, rank).name for rank in range(len(safe))), MANIFEST):
        if not any(name in names for names in safe):
            raise Wrong(f"step {step}: {name} is not synced to the disk",
                        "Your atomic_write does it, for each file of a checkpoint.",
                        code="not_synced")


def _is_of(found, step, rank) -> bool:
    try:
        return torch.equal(found["weight"], state_of(step, rank)["weight"])
    except (TypeError, KeyError, AttributeError):
        return False


def _judge_slow(save_checkpoint, newest_checkpoint, folder):
    """One rank is slow to write its part, and the manifest is slow to come: it must not be there
    before any rank's part, and when the function returns, on whatever rank, the checkpoint must be
    whole."""
    step, rank = STEPS[-1] + 1, dist.get_rank()
    path, early = step_folder(folder, step), []

    def slow(move):
        def moved(source, target, **options):
            name = os.path.basename(target)
            # rank 1's part comes later than a manifest that does not wait for it
            time.sleep(SLOW * (name == MANIFEST) + 2 * SLOW * (name == "rank_1.pt"))
            if name == shard_file(path, rank).name and (path / MANIFEST).exists():
                early.append(name)
            move(source, target, **options)
        return moved

    with (mock.patch.object(os, "replace", slow(os.replace)),
          mock.patch.object(os, "rename", slow(os.rename))):
        save_checkpoint(folder, step, state_of(step, rank), dist.group.WORLD)
    # The invariant shows only in between: a rank that is killed now leaves a manifest that names
    # a part which is not there.
    if early:
        raise Wrong(f"{MANIFEST} was there before {early[0]}", "The manifest says that all parts "
                    "are there: rank 0 writes it when every rank has written its own. An "
                    "all_gather after the writing tells it.", code="manifest_too_early")
    found, problems = _found(newest_checkpoint, folder, "where one rank is slow")
    if found != path:
        raise Wrong(f"save_checkpoint has returned on rank {rank}, but the checkpoint is "
                    f"incomplete: {'; '.join(problems.values()) or 'it is not there'}",
                    "A rank that continues may be killed at once, and assumes that the step is "
                    "saved. All ranks wait until the manifest is there.", code="returns_too_early")


def _found(newest_checkpoint, folder, when):
    path, problems = require_several(newest_checkpoint(folder), ("path or None", "problems"),
                                     f"{when}: newest_checkpoint returned")
    if not isinstance(problems, Mapping):
        raise Wrong(f"{when}: the problems are {kind_of(problems)}, not a dictionary",
                    "The name of each bad checkpoint's folder, and what is wrong with it.",
                    code="wrong_type")
    return None if path is None else Path(path), {Path(name).name: str(problem)
                                                  for name, problem in problems.items()}


def _judge_damage(newest_checkpoint, saved, damage: Damage):
    folder = saved.parent / "damaged"
    shutil.copytree(saved, folder)
    try:
        damage.harm(folder)
        before = set(folder.rglob("*"))
        path, problems = _found(newest_checkpoint, folder, f"with {damage.what}")
        # Invariant: a search changes nothing. What is wrong with a bad checkpoint may be looked
        # into, and repaired, by a person.
        if gone := sorted(before - set(folder.rglob("*"))):
            raise Wrong(f"with {damage.what}: newest_checkpoint removed "
                        f"{gone[0].relative_to(folder)}", "It looks, and changes nothing.",
                        code="removes_files")
        _judge_found(path, problems, folder, damage)
    finally:
        shutil.rmtree(folder)


def _judge_found(path, problems, folder, damage):
    want = None if damage.newest is None else step_folder(folder, damage.newest)
    # Invariant: of all checkpoints that are complete, the one with the largest number. Catches a
    # manifest that is not compared with the files, and names that are compared as text.
    if path != want:
        named = "nothing" if path is None else path.name
        wanted = "nothing is" if want is None else f"{want.name} is the newest that is"
        hint = ("As text, step_9 is larger than step_10: compare the numbers."
                if not damage.bad and named == "step_9" else
                "A checkpoint is valid if its manifest can be read and each rank's file has the "
                "digest that stands there.")
        raise Wrong(f"with {damage.what} newest_checkpoint found {named}, but {wanted} valid", hint,
                    code="wrong_checkpoint")
    bad = {step_folder(folder, step).name: file for step, file in damage.bad.items()}
    # Invariant: each newer checkpoint that was passed over is named with its file, and no other is.
    # Without it, a job loses steps and nobody reads why.
    if missing := [name for name in bad if name not in problems]:
        raise Wrong(f"with {damage.what}: the problems do not name {missing[0]}",
                    "A person who resumes must see what was passed over.", code="problem_not_named")
    if more := [name for name in problems if name not in bad]:
        raise Wrong(f"with {damage.what}: {more[0]} is among the problems: {problems[more[0]]!r}",
                    "Only those that are newer than the one that was found, and bad.",
                    code="problem_invented")
    for name, file in bad.items():
        if file not in problems[name]:
            raise Wrong(f"with {damage.what}: what is wrong with {name} is {problems[name]!r}, "
                        f"which does not name {file}", "Name the file.", code="file_not_named")


def _judge_empty(newest_checkpoint, folder):
    for when in ("where there is no folder", "in an empty folder"):
        path, problems = _found(newest_checkpoint, folder, when)
        if path is not None or problems:
            raise Wrong(f"{when} newest_checkpoint found {path}, {problems}",
                        "The first start has no checkpoint: (None, {}).", code="found_in_nothing")
        folder.mkdir(exist_ok=True)


def _judge_kills(save_checkpoint, newest_checkpoint, folder):
    rng, last = new_generator(), 0
    folder.mkdir()
    for number in range(KILLS):
        # A save takes 10 to 25 ms: so a kill is anywhere in it, and in any of the first ones.
        kill_rank(_save_until_killed, save_checkpoint, folder, last + 1, ranks=2,
                  victim=number % 2, after=rng.uniform(0, 0.3))
        last = _judge_after_kill(newest_checkpoint, folder, last, number)


def _save_until_killed(save_checkpoint, folder, step):
    """Saves one step after the other; `acknowledged` names the last one that any rank says is
    saved."""
    rank = dist.get_rank()
    while True:
        save_checkpoint(folder / "saved", step, state_of(step, rank), dist.group.WORLD)
        with open(folder / f"acknowledged_{rank}", "a") as file:
            file.write(f"{step}\n")
        step += 1


def _judge_after_kill(newest_checkpoint, folder, last, number) -> int:
    said = [int(line) for file in folder.glob("acknowledged_*")
            for line in file.read_text().split("\n")[:-1]]  # a killed rank may leave half a line
    acknowledged = max(said, default=0)
    when = f"after kill {number + 1}, of rank {number % 2}"
    path, _ = _found(newest_checkpoint, folder / "saved", when)
    newest = 0 if path is None else int(path.name.split("_")[1])
    # Invariant: what a rank was told is saved can be loaded. Catches a save that removes the old
    # checkpoint first, and one that returns before the other ranks have written.
    if newest < acknowledged:
        raise Wrong(f"{when}: save_checkpoint had returned for step {acknowledged}, but the newest "
                    f"valid checkpoint is {'none' if not newest else f'step {newest}'}",
                    "Keep the old ones until the new one is complete, and write its manifest last.",
                    code="save_lost")
    # Invariant: all files of a checkpoint are of one step. A kill between the writes of two ranks
    # leaves files of two steps where the same names are used again.
    for rank in range(2 if newest else 0):
        if not _is_of(torch.load(shard_file(path, rank)), newest, rank):
            raise Wrong(f"{when}: {path.name} is said to be valid, but rank_{rank}.pt is of "
                        "another step", code="mixed_steps")
    return max(newest, last)


@shows("8.4")
def show_damage(save_checkpoint: Callable, newest_checkpoint: Callable) -> Table:
    """A table of the kinds of damage to the newest of three checkpoints, and what the student's
    function found and said."""
    with processes.temporary_folder() as folder:
        rows = [(damage.what, "–" if path is None else Path(path).name,
                 "; ".join(f"{Path(name).name}: {problem}".replace(f"{folder}/", "")
                           for name, problem in problems.items()) or "–")
                for damage, path, problems in crash_series.damages(
                    save_checkpoint, newest_checkpoint, Path(folder))]
    return Table("Checkpoints step_8, step_9 and step_10 of two ranks", ("damage", "found",
                 "what is wrong with the newer ones"), rows, left=2)
