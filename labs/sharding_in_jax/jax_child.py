"""The process that has JAX: `python -m labs.sharding_in_jax.jax_child FOLDER DEVICES` calls
the function that FOLDER holds, and writes there what it returned or raised. Imports no torch."""

import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

WORK, RESULT = "work", "result"  # files of the folder


@dataclass(frozen=True)
class Raised:
    """What the function raised. places: (file, line, function) that it went through, outermost
    first."""

    kind: str
    message: str
    places: list[tuple[str, int, str]]


def main(folder: str, devices: str) -> None:
    """Calls the function with so many CPU devices; JAX must know their number before it is used."""
    import jax

    jax.config.update("jax_num_cpu_devices", int(devices))
    try:
        # Inside try: loading the function may import what is not installed here.
        function, args = pickle.loads(Path(folder, WORK).read_bytes())
        result = _without_jax(function(*args))
        data = pickle.dumps(result)
    except BaseException as error:  # sys.exit() too
        frames = traceback.walk_tb(error.__traceback__)
        data = pickle.dumps(Raised(type(error).__name__, str(error), [
            (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]))
    partial = Path(folder, RESULT + ".partial")
    partial.write_bytes(data)
    partial.rename(Path(folder, RESULT))  # whole, or not there at all


def _without_jax(result):
    """The result with its arrays as NumPy's: the process that reads it must not import JAX."""
    import jax
    import numpy

    return jax.tree.map(lambda leaf: numpy.asarray(leaf) if isinstance(leaf, jax.Array) else leaf,
                        result)


if __name__ == "__main__":
    from labs.sharding_in_jax import jax_child  # pickle finds its classes by this name

    jax_child.main(*sys.argv[1:])
