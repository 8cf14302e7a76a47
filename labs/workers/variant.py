"""The variant of a class: `scripts/release --variant NAME` writes NAME beside this file, and then
the training data, the order of the slow runs, and a grader's random cases are other ones, so that
another class's numbers do not fit."""

import functools
import zlib
from pathlib import Path

FILE = Path(__file__).with_name("variant.txt")


@functools.cache
def name() -> str:
    """The variant's name; empty without one."""
    return FILE.read_text(encoding="utf-8").strip() if FILE.exists() else ""


def seed_of(seed: int) -> int:
    """The seed to take in place of this one: the same without a variant."""
    return (seed + zlib.crc32(name().encode())) % 2**31 if name() else seed
