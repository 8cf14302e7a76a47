"""Sizes that fit the machine: chosen by what it has, overridable in a notebook's first cell."""

from dataclasses import dataclass, replace

from labs.workers import cuda


@dataclass(frozen=True)
class Preset:
    """What a notebook trains: a GPT-2 and how it is divided.

    batch: sequences per rank and step. context: tokens of a sequence. cap_bytes: the most bytes of
    a gradient bucket.
    """

    name: str
    ranks: int
    layers: int
    hidden: int
    heads: int
    context: int
    batch: int
    cap_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens that all ranks together process in one step."""
        return self.ranks * self.batch * self.context

    def __str__(self):
        return (f"{self.name}: {self.ranks} ranks, GPT-2 with {self.layers} layers of width "
                f"{self.hidden}, {self.batch} × {self.context} tokens per rank and step, "
                f"buckets of {self.cap_bytes / 1e6:g} MB")

    __repr__ = __str__


PRESETS = {each.name: each for each in (
    Preset("laptop", 2, 6, 128, 4, 64, 8, 800_000),
    Preset("one-gpu", 2, 8, 512, 8, 256, 8, 8_000_000),
    Preset("node", 8, 12, 1024, 16, 512, 8, 25_000_000))}


def preset(name: str | None = None, **changes: int) -> Preset:
    """The preset for this machine, or the one called `name`; changes override single sizes. Raises
    ValueError where there is no such preset or size."""
    if name is not None and name not in PRESETS:
        raise ValueError(f"no preset {name!r}: choose {', '.join(PRESETS)}, or leave it out")
    gpus = cuda.count()
    chosen = PRESETS[name or ("laptop" if gpus == 0 else "one-gpu" if gpus == 1 else "node")]
    if chosen.name == "node":
        chosen = replace(chosen, ranks=max(2, gpus))
    return replace(chosen, **_checked(changes))


def _checked(changes) -> dict:
    sizes = [name for name in Preset.__dataclass_fields__ if name != "name"]
    for name, value in changes.items():
        if name not in sizes:
            raise ValueError(f"a preset has no {name!r}; it has {', '.join(sizes)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
    return changes
