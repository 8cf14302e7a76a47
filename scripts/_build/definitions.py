"""What a solution defines, without what it runs: for tests and benches."""

from types import SimpleNamespace

from labs.checks import previous_work

ROOT = previous_work.ROOT


def definitions(name: str, **values) -> SimpleNamespace:
    """What solutions/NAME.py defines; values replace what it assigns, for example PRESET=...."""
    return previous_work.definitions(ROOT / "solutions" / f"{name}.py", **values)
