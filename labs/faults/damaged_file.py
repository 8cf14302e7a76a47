"""Files that went bad: cut off, or with a flipped bit."""

from pathlib import Path


def truncate(path: Path) -> None:
    """As after a full disk, or where a machine lost its power."""
    data = path.read_bytes()
    # The half that is left begins as the complete file does: only its end, or its length, tells.
    path.write_bytes(data[:len(data) // 2])


def flip_bit_in_file(path: Path) -> None:
    """One bit in the middle, where a tensor's numbers are."""
    data = bytearray(path.read_bytes())
    # torch.load reads such a file without an error.
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
