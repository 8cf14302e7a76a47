"""The names that a package offers, each looked up on first use: importing the package costs nothing
on a rank, needs no Jupyter, and loads nothing that draws."""

import sys
from importlib import import_module


def offered(package: str, names: dict) -> tuple:
    """(__all__, __getattr__, __dir__) for the package's `__init__`.

    names: name -> the module that defines it; one that begins with a dot lies in the package. A
    name must differ from those of the package's own modules: importing one would hide it.
    """
    def look_up(name):
        if name not in names:
            raise AttributeError(f"{package} has no {name!r}; it offers {', '.join(names)}")
        return getattr(import_module(names[name], package), name)

    def listed():
        return sorted([*vars(sys.modules[package]), *names])

    return list(names), look_up, listed
