"""Python's parser, for the threads that grade at the same time."""

import ast
import threading

# Python 3.11 counts in one place for all threads how deep the tree is that it makes: where
# a garbage collection lets another thread parse meanwhile, both end with a SystemError ("recursion
# depth mismatch", python/cpython issue 106905). A finalizer of the same thread may parse, too.
_ONE_AT_A_TIME = threading.RLock()


def parse(source: str) -> ast.Module:
    """As `ast.parse`, from any thread."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)
