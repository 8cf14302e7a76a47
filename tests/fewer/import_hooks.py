"""What our import hooks have in common."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec


def spec_by_others(finder: object, name: str) -> ModuleSpec | None:
    """Returns the module's spec as all other finders have it. finder: the one that asks, of
    sys.meta_path, where it keeps its place."""
    place = sys.meta_path.index(finder)
    del sys.meta_path[place]
    try:
        return importlib.util.find_spec(name)
    finally:
        sys.meta_path.insert(place, finder)
