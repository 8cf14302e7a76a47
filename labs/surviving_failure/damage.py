"""Ways in which checkpoints on a disk go bad, one at a time."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labs.faults.damaged_file import flip_bit_in_file, truncate
from labs.surviving_failure.scaffold import MANIFEST, shard_file, step_folder

STEPS = (8, 9, 10)  # as text, 10 comes before 8 and 9


@dataclass(frozen=True)
class Damage:
    """what: in words. harm: does it to a folder that has checkpoints of STEPS, each of two ranks.
    newest: the newest valid one afterwards. bad: the newer steps that are not, each with the file
    that its problem must name."""

    what: str
    harm: Callable[[Path], None]
    newest: int | None
    bad: dict[int, str]


def _exchange(one: Path, other: Path):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _shard(folder, step, rank) -> Path:
    return shard_file(step_folder(folder, step), rank)


def _manifest(folder, step) -> Path:
    return step_folder(folder, step) / MANIFEST


def _two(folder):
    flip_bit_in_file(_shard(folder, 10, 1))
    _shard(folder, 9, 0).unlink()


def _all(folder):
    for step in STEPS:
        truncate(_shard(folder, step, 0))


def _hundred(folder):
    """Step 100, which is valid and newer than 10 and 9."""
    shutil.copytree(step_folder(folder, 9), step_folder(folder, 100))


DAMAGES = (
    Damage("no damage", lambda folder: None, 10, {}),
    Damage("a leftover of a killed write",
           lambda folder: Path(f"{_shard(folder, 10, 1)}.part").write_bytes(b"half"), 10, {}),
    # A file, where a search that takes every entry for a folder raises NotADirectoryError.
    Damage("a file beside the checkpoints", lambda folder: (folder / "notes.txt").write_text("x"),
           10, {}),
    # Sizes find these; a flipped bit below leaves the size, and torch.load does not notice it.
    Damage("a truncated shard", lambda folder: truncate(_shard(folder, 10, 1)), 9, {10: "rank_1"}),
    Damage("an empty shard", lambda folder: _shard(folder, 10, 0).write_bytes(b""), 9,
           {10: "rank_0"}),
    Damage("a flipped bit in a shard", lambda folder: flip_bit_in_file(_shard(folder, 10, 0)), 9,
           {10: "rank_0"}),
    Damage("a missing shard", lambda folder: _shard(folder, 10, 1).unlink(), 9, {10: "rank_1"}),
    Damage("a missing manifest", lambda folder: _manifest(folder, 10).unlink(), 9,
           {10: "manifest"}),
    Damage("a truncated manifest", lambda folder: truncate(_manifest(folder, 10)), 9,
           {10: "manifest"}),
    Damage("an empty manifest", lambda folder: _manifest(folder, 10).write_bytes(b""), 9,
           {10: "manifest"}),
    # Each of the two files is complete: only the digest of its rank finds that it is in the wrong
    # place.
    Damage("the two ranks' shards exchanged", lambda folder: _exchange(
        _shard(folder, 10, 0), _shard(folder, 10, 1)), 9, {10: "rank_0"}),
    Damage("a shard of the step before", lambda folder: shutil.copyfile(
        _shard(folder, 9, 1), _shard(folder, 10, 1)), 9, {10: "rank_1"}),
    Damage("two bad ones", _two, 8, {10: "rank_1", 9: "rank_0"}),
    # Older than the newest complete one: not named, because nothing was passed over for it.
    Damage("an old one that is bad", lambda folder: flip_bit_in_file(_shard(folder, 8, 1)), 10, {}),
    Damage("all of them bad", _all, None, dict.fromkeys((10, 9, 8), "rank_0")),
    Damage("a step of three digits", _hundred, 100, {}))
