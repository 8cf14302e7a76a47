"""What a student of notebook 07c calls: the block's arrays, and `place_arrays`, which puts them on
the devices of JAX's mesh. Both processes import this file, so JAX is imported inside a function
only."""

import numpy

# (tokens, hidden), (hidden, inner), (inner, hidden): more tokens than hidden, as in training
SHAPES = {"x": (1024, 64), "up": (64, 256), "down": (256, 64), "y": (1024, 64)}


def block_arrays() -> dict[str, numpy.ndarray]:
    """The block's input and weights as NumPy arrays in float32, the same in every process."""
    rng = numpy.random.default_rng(7)
    x, *weights = (rng.standard_normal(SHAPES[name]) for name in ("x", "up", "down"))
    up, down = (weight / len(weight) ** 0.5 for weight in weights)
    return {name: array.astype("float32") for name, array in (("x", x), ("up", up), ("down", down))}


def place_arrays(specs: dict) -> list:
    """In JAX's process: x, up and down on the current mesh, each as its PartitionSpec says."""
    import jax

    return [jax.device_put(array, specs[name]) for name, array in block_arrays().items()]
