"""Files that went bad: cut off, or with a flipped bit."""

from pathlib import Path


def truncate(path: Path) -> None:
    """As after a full disk, or where a machine lost its power."""
    data = path.read_bytes()
    path.write_bytes(data[:len(data) // 2])


def flip_bit_in_file(path: Path) -> None:
    """One bit in the middle, where a tensor's numbers are."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
