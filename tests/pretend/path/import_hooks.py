"""What our import hooks have in common."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec


def spec_by_others(finder: object, name: str) -> ModuleSpec | None:
    """Returns the module's spec as all other finders have it. finder: the one that asks, of
    sys.meta_path."""
    sys.meta_path.remove(finder)
    try:
        return importlib.util.find_spec(name)
    finally:
        sys.meta_path.insert(0, finder)
