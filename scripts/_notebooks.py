"""The names of the notebooks: "07a_tensor_parallel" has the number "07a" and the package
"tensor_parallel". Python 3.6.

A number is two digits and perhaps a letter, where several notebooks share the digits: the exercises
then run through them, and "07" means 07a to 07d. Sorted by name they come in their order.
"""

import re
from pathlib import Path

NUMBER = r"\d\d[a-z]?"
_NAME = re.compile(rf"({NUMBER})_(\w+)$")


def number(name):
    """Return "07a" of "07a_tensor_parallel", and "" of what is no name of a notebook."""
    match = _NAME.match(name)
    return match.group(1) if match else ""


def package(name):
    """Return the name of a notebook's package in labs/: "tensor_parallel"."""
    return _NAME.match(name).group(2)


def paths(folder, suffix=".py"):
    """Return the paths of a folder's notebooks, in their order; ".py": of their sources."""
    return sorted(path for path in Path(folder).glob(f"*{suffix}") if number(path.stem))


def chosen(wanted, names):
    """Return those of the names that `wanted` stands for: a number ("07a"; "07" for all that have
    these digits), a name, or a path of it."""
    stem = re.sub(r"\.(py|ipynb)$", "", Path(wanted).name)
    return [name for name in names if stem in (name, number(name), number(name)[:2])]
