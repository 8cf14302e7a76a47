"""Hides Jupyter and all that comes with it from this process, as on a machine without it."""

import sys
from importlib.machinery import PathFinder

HIDDEN = {"IPython", "anywidget", "ipykernel", "ipywidgets", "jupyter", "jupyter_client",
          "jupyter_core", "jupyter_events", "jupyter_server", "jupyterlab", "jupyterlab_server",
          "jupyterlab_widgets", "jupytext", "nbclient", "nbconvert", "nbformat", "nbval",
          "notebook", "notebook_shim", "traitlets", "widgetsnbextension", "comm", "debugpy",
          "matplotlib_inline", "tornado", "zmq"}


class Finder(PathFinder):
    """The usual one, for which the hidden packages are not installed."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.split(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


def hide() -> None:
    """Hides them from now on."""
    sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
