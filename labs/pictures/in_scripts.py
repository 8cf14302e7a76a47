"""What a notebook shows, in a plain script. Imports nothing that draws: ranks import it too."""

import sys
from typing import TypeVar

Drawn = TypeVar("Drawn")


def print_in_script(result: Drawn) -> Drawn:
    """Returns `result`. In a plain script nobody draws the last expression of a cell: there its
    words are printed."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print(result)
    return result
