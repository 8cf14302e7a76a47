"""The sizes that the bytes of a training step grow with, and how recorded bytes scale with them.

A tensor of a step has c·b·s·h bytes, or c·b·a·s·s: a constant times a product of sizes. A step is
recorded at sizes that are distinct primes, so that the prime factors of a tensor's bytes say which
sizes it is a product of. It is recorded at two such points, which must give the same product and
the same constant.
"""

import copy
from dataclasses import dataclass

import numpy as np

BATCH = ("batch", "sequence", "shifted")
WIDTHS = ("hidden", "ffn", "vocabulary", "positions", "kv_heads", "group", "fused_group",
          "head_dim")
SYMBOLS = BATCH + WIDTHS
"""shifted: sequence + 1, because labels are padded by one before they are shifted. group: query
heads per key head. fused_group: group + 2, where one product makes queries, keys and values."""

# (sequence + 1) / 2 and group + 2 are primes too. A head's width is 8 times a prime, because rotary
# embedding turns a half or a quarter of it, cut in halves.
_POINTS = (
    dict(batch=83, sequence=193, hidden=211, ffn=223, vocabulary=233, positions=239, kv_heads=89,
         group=101, head_dim=8 * 29),
    dict(batch=127, sequence=277, hidden=307, ffn=311, vocabulary=331, positions=337, kv_heads=113,
         group=107, head_dim=8 * 31),
)
_WIDE_HEAD = 256  # transformers copies the keys of wider heads (integrations/sdpa_attention.py)
_PRIME = {"shifted": 2, "head_dim": 8}  # symbol -> its value over its prime
_ATTRIBUTES = {  # names in Hugging Face's configurations
    "hidden": ("hidden_size",), "ffn": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",), "positions": ("max_position_embeddings",),
    "head_dim": ("head_dim",)}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


class NotScalable(ValueError):
    """A tensor's bytes are no constant times a product of the known sizes."""


def sizes_of(config, batch: int, sequence: int) -> dict[str, int]:
    """Symbol -> its value for this model and batch; 1 where the model has no such size."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    found = {name: getattr(config, attribute) for name in _ATTRIBUTES
             if (attribute := _attribute(config, name))}
    found["ffn"] = found.get("ffn") or 4 * hidden  # GPT-2's n_inner=None
    if "head_dim" not in found:  # then the residual stream is as wide as all heads together
        if hidden % heads:
            raise ValueError(f"a hidden size of {hidden} cannot be cut into {heads} heads")
        found |= {"head_dim": hidden // heads, "hidden": 1}
    return _complete(found | dict(batch=batch, sequence=sequence, kv_heads=kv_heads,
                                  group=heads // kv_heads))


def _complete(chosen: dict) -> dict[str, int]:
    derived = {"shifted": chosen["sequence"] + 1, "fused_group": chosen["group"] + 2}
    return dict.fromkeys(SYMBOLS, 1) | chosen | derived


def _attribute(config, name):
    """The attribute that holds a size; of a head's width, only where it may be any number."""
    free = name != "head_dim" or getattr(config, name, None)
    return next((a for a in _ATTRIBUTES[name] if free and hasattr(config, a)), None)


@dataclass(frozen=True)
class Point:
    """A configuration at which to record, and the symbols' values there."""

    config: object
    values: dict[str, int]


def points(config, batch: int, sequence: int, layers: int, widths: bool = True) -> list[Point]:
    """Two points with as many layers, whose tensors are made in the same order as this model's.

    What is 1 stays 1, because other operations run then: one sequence, one key head, as many key
    heads as query heads. widths: replace the model's widths too, not only batch and sequence.
    """
    actual = sizes_of(config, batch, sequence)
    scaled = SYMBOLS if widths else BATCH
    wide = 5 if actual["head_dim"] > _WIDE_HEAD else 1
    found = [_complete({name: value if actual[name] > 1 and name in scaled else 1
                        for name, value in {**point, "head_dim": wide * point["head_dim"]}.items()})
             for point in _POINTS]
    return [_point(config, layers, widths, sequence, values) for values in found]


def _point(config, layers, widths, sequence, values) -> Point:
    new = copy.deepcopy(config)
    _cut(new, config.num_hidden_layers, layers)
    window = getattr(config, "sliding_window", None)
    if window:  # transformers makes a mask only where the window is no longer than the sequence
        new.sliding_window = max(1, values["sequence"] // 2) if sequence >= window else 10**6
    for name in _TOKENS:
        setattr(new, name, None)
    if widths:
        _set_widths(new, values)
    else:
        values = values | {"fused_group": 1}
    return Point(new, values)


def _cut(config, whole, layers):
    config.num_hidden_layers = layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:layers])


def _set_widths(config, values):
    heads = values["kv_heads"] * values["group"]
    hidden = values["hidden"] if _attribute(config, "head_dim") else heads * values["head_dim"]
    config.num_attention_heads = heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = values["kv_heads"]
    for name in _ATTRIBUTES:
        if attribute := _attribute(config, name):
            setattr(config, attribute, hidden if name == "hidden" else values[name])


@dataclass(frozen=True)
class Products:
    """Numbers, each coefficient · Π symbol^power. coefficients: (n,); powers: (n, symbols); index:
    for each number, which of the n it is."""

    coefficients: np.ndarray
    powers: np.ndarray
    index: np.ndarray

    def at(self, values: dict[str, int]) -> np.ndarray:
        """The numbers where the symbols have these values; exact up to 2^53."""
        symbols = np.array([values[name] for name in SYMBOLS], dtype=float)
        return (self.coefficients * np.prod(symbols ** self.powers, axis=1))[self.index]


def products(first: list[int], second: list[int], at: list[Point]) -> Products:
    """The products that give the `first` numbers at one point and the `second` at the other.
    Raises NotScalable."""
    distinct = {}
    index = [distinct.setdefault(pair, len(distinct)) for pair in zip(first, second, strict=True)]
    found = [_factored(number, at[0].values) for number, _ in distinct]
    confirmed = [_factored(number, at[1].values) for _, number in distinct]
    for pair, one, two in zip(distinct, found, confirmed, strict=True):
        if one != two:
            raise NotScalable(f"{pair} are not one product of sizes")
    return Products(np.array([constant for constant, _ in found]),
                    np.array([powers for _, powers in found], dtype=float), np.array(index))


def _factored(number: int, values: dict[str, int]) -> tuple:
    """(constant, power of each symbol) from the number's prime factors."""
    # rest: what is left after division by the symbols' values, the constant
    powers, rest = [], float(number)
    for name in SYMBOLS:
        value, power = values[name], 0
        prime = value // _PRIME.get(name, 1)
        while value > 1 and prime > 1 and number % prime == 0:
            number, rest, power = number // prime, rest / value, power + 1
        powers.append(power)
    return rest, tuple(powers)
