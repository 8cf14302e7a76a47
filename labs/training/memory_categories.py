"""What a rank's memory holds while it trains: one set of names for what is measured and what is
predicted, so that one can be laid on the other."""

from dataclasses import astuple, dataclass, fields

GB, GiB = 10**9, 2**30
NAMES = ("parameters", "gradients", "optimizer state", "activations", "buffers", "other")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by category.

    parameters: weights (a rank's shard, where they are sharded), and the model's own buffers.
    gradients: `.grad` of the parameters. optimizer_state: moments, master weights.
    activations: what forward saves for backward, and temporaries of both. buffers: what
    communication needs: buckets, gathered parameters, reduce-scatter inputs. other: the rest.
    """

    parameters: float = 0
    gradients: float = 0
    optimizer_state: float = 0
    activations: float = 0
    buffers: float = 0
    other: float = 0

    @property
    def total(self) -> float:
        """Bytes of all categories together."""
        return sum(astuple(self))

    def by_name(self) -> dict:
        """Category name, as charts show it -> bytes."""
        return {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}

    def __add__(self, other):
        return Memory(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
