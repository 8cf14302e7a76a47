"""Exercise 8.4: what its check must reject, with the words that must say why; and what it must
accept."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected

import labs.surviving_failure as lab
from labs.surviving_failure.scaffold import MANIFEST, digest, shard_file, step_folder

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("08_surviving_failure")
atomic_write, save, newest = right.atomic_write, right.save_checkpoint, right.newest_checkpoint


def digests_of(data, group):
    digests = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest(data), group=group)
    return digests


def write_manifest(path, digests):
    atomic_write(path / MANIFEST, json.dumps(digests).encode())


def finish(path, data, group):
    """What follows when this rank has its shard: the manifest, and nobody returns before it."""
    digests = digests_of(data, group)
    if dist.get_rank(group) == 0:
        write_manifest(path, digests)
    dist.barrier(group)


def shard_of(folder, step, state, group):
    """(folder of the step, this rank's file, its bytes)"""
    path = step_folder(folder, step)
    path.mkdir(parents=True, exist_ok=True)
    return path, shard_file(path, dist.get_rank(group)), lab.to_bytes(state)


def move_steps(source, target):
    """A killed process may have left a step in both."""
    for path in list(source.glob("step_*")):
        shutil.rmtree(target / path.name, ignore_errors=True)
        path.rename(target / path.name)


class WrongSave:
    def nothing(folder, step, state, group):
        return None

    def rank_0_alone(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, group)
        if dist.get_rank(group) == 0:
            atomic_write(file, data)
            write_manifest(path, [digest(data)])
        dist.barrier(group)

    def no_manifest(folder, step, state, group):
        _, file, data = shard_of(folder, step, state, group)
        atomic_write(file, data)
        dist.barrier(group)

    def all_in_one_file(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, group)
        states = [None] * dist.get_world_size(group)
        dist.all_gather_object(states, state, group=group)
        data = lab.to_bytes(states)
        atomic_write(file, data)
        finish(path, data, group)

    def state_of_rank_0(folder, step, state, group):
        states = [state]
        dist.broadcast_object_list(states, src=0, group=group)
        save(folder, step, states[0], group)

    def nobody_waits(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, group)
        atomic_write(file, data)
        digests = digests_of(data, group)
        if dist.get_rank(group) == 0:
            write_manifest(path, digests)

    def manifest_first(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, group)
        digests = digests_of(data, group)
        if dist.get_rank(group) == 0:
            write_manifest(path, digests)
        dist.barrier(group)
        atomic_write(file, data)

    def manifest_before_the_others(folder, step, state, group):
        """The digests are exchanged before anybody writes. At the end all wait, so only a look in
        between shows it."""
        path, file, data = shard_of(folder, step, state, group)
        digests = digests_of(data, group)
        atomic_write(file, data)
        if dist.get_rank(group) == 0:
            write_manifest(path, digests)
        dist.barrier(group)

    def shards_not_synced(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, group)
        file.write_bytes(data)
        finish(path, data, group)

    def manifest_not_synced(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, group)
        atomic_write(file, data)
        digests = digests_of(data, group)
        if dist.get_rank(group) == 0:
            (path / MANIFEST).write_text(json.dumps(digests))
        dist.barrier(group)

    def folder_must_be_new(folder, step, state, group):
        if dist.get_rank(group) == 0:
            step_folder(folder, step).mkdir(parents=True)
        dist.barrier(group)
        save(folder, step, state, group)

    def rank_in_the_world(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, dist.group.WORLD)
        atomic_write(file, data)
        finish(path, data, group)

    def without_the_group(folder, step, state, group):
        save(folder, step, state, dist.group.WORLD)

    def rank_modulo_size(folder, step, state, group):
        """Each file has a digest that fits, and the state of another rank of the group."""
        size = dist.get_world_size(group)
        path = shard_of(folder, step, state, group)[0]
        atomic_write(shard_file(path, dist.get_rank() % size), lab.to_bytes(state))
        dist.barrier(group)
        if dist.get_rank(group) == 0:
            files = [shard_file(path, rank).read_bytes() for rank in range(size)]
            write_manifest(path, [digest(data) for data in files])
        dist.barrier(group)

    def pickled(folder, step, state, group):
        path, file, _ = shard_of(folder, step, state, group)
        data = pickle.dumps(state)
        atomic_write(file, data)
        finish(path, data, group)

    def view_of_all(folder, step, state, group):
        """torch.save writes the whole storage of a view."""
        states = [None] * dist.get_world_size(group)
        dist.all_gather_object(states, state, group=group)
        weights = torch.stack([each["weight"] for each in states])
        save(folder, step, {**state, "weight": weights[dist.get_rank(group)]}, group)

    def old_ones_moved_aside(folder, step, state, group):
        """While it saves, nobody can load an old one; afterwards all are back."""
        aside = Path(folder, "aside")
        if dist.get_rank(group) == 0:
            aside.mkdir(exist_ok=True, parents=True)
            move_steps(Path(folder), aside)
        dist.barrier(group)
        save(folder, step, state, group)
        if dist.get_rank(group) == 0:
            move_steps(aside, Path(folder))
        dist.barrier(group)

    def next_free_number(folder, step, state, group):
        """What a killed job has left of this step is not touched."""
        free = step
        while step_folder(folder, free).exists():
            free += 1
        numbers = [None] * dist.get_world_size(group)
        dist.all_gather_object(numbers, free, group=group)
        save(folder, max(numbers), state, group)

    def old_ones_removed(folder, step, state, group):
        if dist.get_rank(group) == 0:
            for path in Path(folder).glob("step_*"):
                shutil.rmtree(path)
        dist.barrier(group)
        save(folder, step, state, group)


class WrongNewest:
    def nothing(folder):
        return None

    def the_last_name(folder):
        return max(Path(folder).glob("step_*"), default=None), {}

    def the_last_number(folder):
        return max(Path(folder).glob("step_*"), key=lambda path: int(path.name[5:]),
                   default=None), {}

    def by_text(folder):
        problems = {}
        for path in sorted(Path(folder).glob("step_*"), reverse=True):
            if problem := right.what_is_wrong(path):
                problems[path.name] = problem
            else:
                return path, problems
        return None, problems

    def what_loads(folder):
        problems = {}
        for path in newest_first(folder):
            try:
                for rank in range(len(json.loads((path / MANIFEST).read_bytes()))):
                    torch.load(shard_file(path, rank))
                return path, problems
            except Exception as error:
                problems[path.name] = f"manifest.json, rank_0.pt, rank_1.pt: {error}"
        return None, problems

    def what_has_a_manifest(folder):
        problems = {}
        for path in newest_first(folder):
            if (path / MANIFEST).exists():
                return path, problems
            problems[path.name] = "manifest.json is missing"
        return None, problems

    def digests_in_any_order(folder):
        problems = {}
        for path in newest_first(folder):
            try:
                want = json.loads((path / MANIFEST).read_bytes())
            except (OSError, ValueError):
                problems[path.name] = "manifest.json"
                continue
            found = {digest(file.read_bytes()): file for file in path.glob("rank_*.pt")}
            if set(found) == set(want):
                return path, problems
            problems[path.name] = "rank_0.pt or rank_1.pt"
        return None, problems

    def no_names(folder):
        return newest(folder)[0], {}

    def file_not_named(folder):
        path, problems = newest(folder)
        return path, dict.fromkeys(problems, "damaged")

    def all_problems(folder):
        path, problems = newest(folder)
        return path, problems | {old.name: "rank_1.pt" for old in newest_first(folder)
                                 if old != path}

    def empty_manifest_raises(folder):
        for path in newest_first(folder):
            json.loads((path / MANIFEST).read_bytes())
        return newest(folder)

    def bad_ones_removed(folder):
        path, problems = newest(folder)
        for name in problems:
            shutil.rmtree(Path(folder, name))
        return path, problems

    def by_time(folder):
        problems = {}
        for path in sorted(Path(folder).glob("step_*"), key=os.path.getmtime, reverse=True):
            if problem := right.what_is_wrong(path):
                problems[path.name] = problem
            else:
                return path, problems
        return None, problems

    def first_start_is_a_problem(folder):
        path, problems = newest(folder)
        return path, problems or ({} if path else {str(folder): "nothing is saved"})

    def folder_must_exist(folder):
        list(Path(folder).iterdir())
        return newest(folder)


def newest_first(folder):
    return sorted(Path(folder).glob("step_*"), key=lambda path: int(path.name[5:]), reverse=True)


class Right:
    def two_barriers(folder, step, state, group):
        path, file, data = shard_of(folder, step, state, group)
        atomic_write(file, data)
        atomic_write(path / f"{file.name}.sha", hashlib.sha256(data).hexdigest().encode())
        dist.barrier(group)
        if dist.get_rank(group) == 0:
            names = sorted(path.glob("rank_*.sha"), key=lambda name: int(name.name[5:-7]))
            write_manifest(path, [name.read_text() for name in names])
        dist.barrier(group)

    def recursive(folder, limit=float("inf")):
        steps = [step for path in Path(folder).glob("step_*")
                 if (step := int(path.name.split("_")[1])) < limit]
        if not steps:
            return None, {}
        path = step_folder(folder, max(steps))
        problem = right.what_is_wrong(path)
        if not problem:
            return str(path), {}
        found, problems = Right.recursive(folder, max(steps))
        return found, {str(path): problem, **problems}


SAVE_WORDS = {
    "nothing": "shards_missing step_8/rank_0.pt",
    "rank_0_alone": "shards_missing step_8/rank_1.pt",
    "no_manifest": "manifest_missing",
    "all_in_one_file": "wrong_state|state_of_another_rank rank_0.pt",
    "state_of_rank_0": "state_of_another_rank rank_1.pt",
    "nobody_waits": "returns_too_early",
    "manifest_first": "manifest_too_early",
    "manifest_before_the_others": "manifest_too_early rank_1.pt",
    "shards_not_synced": "not_synced rank_0.pt",
    "manifest_not_synced": "not_synced manifest.json",
    "folder_must_be_new": "raised_FileExistsError",
    "rank_in_the_world": "not_found",
    "without_the_group": "collectives_differ|deadlock|no_progress|raised_ValueError",
    "rank_modulo_size": "wrong_rank",
    "pickled": "unreadable_file",
    "view_of_all": "saves_others_shards",
    "old_ones_moved_aside": "save_lost",
    "next_free_number": "mixed_steps",
    "old_ones_removed": "removes_old",
}
NEWEST_WORDS = {
    "nothing": "wrong_count",
    "the_last_name": "wrong_checkpoint",
    "the_last_number": "wrong_checkpoint",
    "by_text": "wrong_checkpoint",
    "what_loads": "wrong_checkpoint flipped",
    "what_has_a_manifest": "wrong_checkpoint",
    "digests_in_any_order": "wrong_checkpoint exchanged",
    "no_names": "problem_not_named",
    "file_not_named": "file_not_named",
    "all_problems": "problem_invented",
    "empty_manifest_raises": "raised_FileNotFoundError|raised_JSONDecodeError",
    "bad_ones_removed": "removes_files",
    "by_time": "wrong_checkpoint",
    "first_start_is_a_problem": "found_in_nothing",
    "folder_must_exist": "raised_FileNotFoundError",
}


@pytest.mark.parametrize("name", SAVE_WORDS)
def test_wrong_save(name):
    assert_rejected(lab.check_checkpoints(vars(WrongSave)[name], newest), SAVE_WORDS[name])


@pytest.mark.parametrize("name", NEWEST_WORDS)
def test_wrong_search(name):
    assert_rejected(lab.check_checkpoints(save, vars(WrongNewest)[name]), NEWEST_WORDS[name])


@pytest.mark.parametrize("answers", [(save, newest), (Right.two_barriers, newest),
                                     (save, Right.recursive)])
def test_right_answers(answers):
    verdict = lab.check_checkpoints(*answers)
    assert verdict.passed, str(verdict)


def test_waits():
    def unfilled(*_):
        raise NotImplementedError("Exercise 8.4")

    for answers in ((unfilled, newest), (save, unfilled)):
        verdict = lab.check_checkpoints(*answers)
        assert verdict.passed is None and "8.4" in str(verdict), str(verdict)
