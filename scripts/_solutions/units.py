"""Numbers with their units, as a page shows them."""

_SCALES = {"bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")),
           "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
           "FLOP": ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1, "FLOP"))}

_MEMORY = ("bytes", "kB", "MB", "GB", "s·b·h", "layers")
_TRAFFIC = ("sent", "communicated", "all-reduced", "leave each", "read by",
            "collectives")  # in a metric's name
_SPEED = ("s", "ms", "×", "tokens/s", "FLOP")
TIME = "Time and scaling"


def subject(name: str, unit: str) -> str:
    """What a metric is about, as the page's sections are called."""
    if unit.startswith("calls") or any(words in name for words in _TRAFFIC):
        return "Traffic"
    if unit in _MEMORY or "largest" in name:
        return "Memory"
    is_time = unit in _SPEED or any(words in name for words in ("share", "of the recorded step"))
    return TIME if is_time else "Other numbers"


def written(value: float | None, unit: str) -> str:
    """A value to three digits in the multiple of its unit that reads best: "1.23 GB"."""
    if value is None:
        return "–"
    for size, name in _SCALES.get(unit, ()):
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return f"{_digits(value)} {unit}".strip()


def _digits(value) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
