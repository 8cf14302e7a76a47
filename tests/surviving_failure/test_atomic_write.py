"""Exercise 8.3: what its check must reject, with the words that must say why; and what it must
accept."""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("08_surviving_failure").atomic_write


def sync_folder(path):
    number = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def to_part(path, data, mode="wb", **options):
    """Writes and syncs path.part, and returns its name."""
    part = f"{path}.part"
    with open(part, mode, **options) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return part


class Wrong:
    def nothing(path, data):
        return None

    def over_the_old(path, data):
        Path(path).write_bytes(data)

    def over_the_old_and_synced(path, data):
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path)

    def never_synced(path, data):
        Path(f"{path}.part").write_bytes(data)
        os.replace(f"{path}.part", path)
        sync_folder(path)

    def synced_before_flush(path, data):
        with open(f"{path}.part", "wb", buffering=10_000_000) as file:
            file.write(data)
            os.fsync(file.fileno())
        os.replace(f"{path}.part", path)
        sync_folder(path)

    def synced_after_the_rename(path, data):
        Path(f"{path}.part").write_bytes(data)
        os.replace(f"{path}.part", path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sync_folder(path)

    def folder_not_synced(path, data):
        os.replace(to_part(path, data), path)

    def folder_synced_too_early(path, data):
        part = to_part(path, data)
        sync_folder(path)
        os.replace(part, path)

    def folder_left_open(path, data):
        os.replace(to_part(path, data), path)
        os.fsync(os.open(os.path.dirname(path), os.O_RDONLY))

    def removed_first(path, data):
        try:
            part = to_part(path, data)
        except OSError:
            Path(f"{path}.part").unlink()
            raise
        if os.path.exists(path):
            os.remove(path)
        os.rename(part, path)
        sync_folder(path)

    def a_copy_of_the_part(path, data):
        shutil.copyfile(to_part(path, data), path)
        os.remove(f"{path}.part")
        sync_folder(path)

    def new_name_each_time(path, data):
        number, part = tempfile.mkstemp(dir=os.path.dirname(path))
        try:
            with open(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(number)
        except OSError:
            os.remove(part)
            raise
        os.replace(part, path)
        sync_folder(path)

    def part_must_be_new(path, data):
        os.replace(to_part(path, data, mode="xb"), path)
        sync_folder(path)

    def error_swallowed(path, data):
        try:
            right(path, data)
        except OSError:
            pass

    def part_left_on_a_full_disk(path, data):
        os.replace(to_part(path, data), path)
        sync_folder(path)

    def another_error(path, data):
        try:
            right(path, data)
        except OSError as error:
            raise RuntimeError("not saved") from error

    def part_left_by_a_sync(path, data):
        """Looks after errors of write, and not after those of fsync."""
        part = f"{path}.part"
        with open(part, "wb") as file:
            try:
                file.write(data)
            except OSError:
                os.remove(part)
                raise
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path)

    def less_than_all(path, data):
        """Without Python's buffer, file.write may write a part, and returns how much."""
        try:
            os.replace(to_part(path, data, buffering=0), path)
        except OSError:
            Path(f"{path}.part").unlink(missing_ok=True)
            raise
        sync_folder(path)

    def in_another_folder(path, data):
        with tempfile.TemporaryDirectory() as folder:
            shutil.move(to_part(os.path.join(folder, "new"), data), path)
        sync_folder(path)

    def same_size_is_skipped(path, data):
        if not os.path.exists(path) or os.path.getsize(path) != len(data):
            right(path, data)

    def returns_its_path(path, data):
        right(path, data)
        return str(path)

    def in_the_background(path, data):
        threading.Thread(target=right, args=(path, data)).start()


class Right:
    def with_numbers(path, data):
        path = Path(path)
        part = path.with_name(f".{path.name}.new")
        number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(number, rest):]
            os.fdatasync(number)
        except OSError:
            part.unlink()
            raise
        finally:
            os.close(number)
        part.rename(path)
        sync_folder(path)

    def whatever_is_raised(path, data):
        try:
            os.replace(to_part(path, data), path)
        except BaseException:
            Path(f"{path}.part").unlink(missing_ok=True)
            raise
        sync_folder(path)

    def all_disks_too(path, data):
        """os.sync besides, which has no argument and reports no error."""
        Right.whatever_is_raised(path, data)
        os.sync()


WORDS = {
    "nothing": "file_missing",
    "over_the_old": "half_written",
    "over_the_old_and_synced": "half_written",
    "never_synced": "not_synced synced",
    "synced_before_flush": "not_flushed",
    "synced_after_the_rename": "not_synced renamed",
    "folder_not_synced": "folder_not_synced",
    "folder_synced_too_early": "folder_not_synced",
    "folder_left_open": "file_left_open",
    "removed_first": "old_file_gone",
    "a_copy_of_the_part": "half_written",
    "new_name_each_time": "temporary_file_left after",
    "part_must_be_new": "stumbles_over_remains",
    "error_swallowed": "error_lost",
    "part_left_on_a_full_disk": "temporary_file_left",
    "another_error": "wrong_error",
    "part_left_by_a_sync": "temporary_file_left os.fsync",
    "less_than_all": "wrong_bytes",
    "in_another_folder": "other_folder",
    "same_size_is_skipped": "save_lost",
    "returns_its_path": "wrong_type",
    "in_the_background": "file_missing|wrong_bytes|temporary_file_left",
}


@pytest.mark.parametrize("name", WORDS)
def test_wrong_answer(name):
    assert_rejected(lab.check_atomic_write(vars(Wrong)[name]), WORDS[name])


@pytest.mark.parametrize("answer", [right, Right.with_numbers, Right.whatever_is_raised,
                                    Right.all_disks_too])
def test_right_answer(answer):
    verdict = lab.check_atomic_write(answer)
    assert verdict.passed, str(verdict)


def test_waits():
    assert_waits(lab.check_atomic_write, "8.3")
