"""Names a line of code as the student knows it: cell number, line, source text."""

import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types
from dataclasses import dataclass

_LABS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_COMPILED = f"{os.sep}torchinductor_"  # where torch.compile writes the code that it makes
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_paths()[name])
                    for name in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Place:
    """One frame: file, line (from 1) and function name."""

    filename: str
    line: int
    function: str

    @property
    def is_students(self) -> bool:
        """Whether the frame is the student's own, not a library's and not ours."""
        return _is_students(self.filename)

    @property
    def is_ours(self) -> bool:
        """Whether the frame is one of the workbook's own."""
        return self.filename.startswith(_LABS + os.sep)

    @property
    def source(self) -> str:
        """The text of the line, without its indentation."""
        # A file may have been edited since it was read, as a script between two runs.
        linecache.checkcache(self.filename)
        return linecache.getline(self.filename, self.line).strip()

    @property
    def above(self) -> str:
        """The text of the nearest line above it that is not empty."""
        lines = map(str.strip, linecache.getlines(self.filename)[:self.line - 1])
        return next(filter(None, reversed(list(lines))), "")

    @property
    def left_below_code(self) -> str:
        """Says, where it is so, that the line that raises until an exercise is filled in still
        stands below code. In a student's notebook the line above it is a comment."""
        above = self.above.rstrip("\"'")
        is_code = above and above == self.above and not above.startswith("#") and above[-1] != ":"
        if not is_code or not self.source.startswith("raise NotImplementedError"):
            return ""
        return f"{self} still raises an error, below your code; remove that line"

    def __str__(self):
        return f"{_cell(self.filename) or os.path.basename(self.filename)} line {self.line}"


@functools.cache
def _is_students(filename) -> bool:
    if filename.startswith("<") and not filename.startswith("<ipython"):
        return False
    path = os.path.realpath(filename)
    return not (path.startswith((*_LIBRARIES, _LABS + os.sep)) or "site-packages" in path
                or _COMPILED in path)


def students(stack: list[Place]) -> list[Place]:
    """The student's own places on a stack, outermost first; if none is theirs, the innermost that
    we call and that is not ours: none on a rank that does our work, as when their function ended.
    """
    own = [place for place in stack if place.is_students]
    below = list(itertools.dropwhile(lambda place: not place.is_ours, stack)) or stack
    return own or [place for place in below if not place.is_ours][-1:]


def stack_of(frame: types.FrameType) -> list[Place]:
    """The places of a running frame and its callers, outermost first."""
    return _places(traceback.walk_stack(frame))[::-1]


def calling_place(frame: types.FrameType) -> Place:
    """The innermost of a running frame and its callers that is the student's; failing that, ours;
    failing that, the frame itself. Ranks ask for it before each collective, so it makes no Place of
    the frames in between."""
    ours = None
    for caller, line in traceback.walk_stack(frame):
        filename = caller.f_code.co_filename
        if _is_students(filename):
            return Place(filename, line, caller.f_code.co_name)
        if ours is None and filename.startswith(_LABS + os.sep):
            ours = Place(filename, line, caller.f_code.co_name)
    return ours or Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def caller_of_torch(frame: types.FrameType) -> Place:
    """The innermost of a running frame and its callers that is neither torch's nor ours, nor of the
    modules by which torch wraps its functions."""
    torch = os.path.join("site-packages", "torch") + os.sep
    wrappers = ("typing_extensions.py", "contextlib.py", "warnings.py")
    for caller, line in traceback.walk_stack(frame):
        place = Place(caller.f_code.co_filename, line, caller.f_code.co_name)
        if not (place.is_ours or torch in place.filename
                or os.path.basename(place.filename) in wrappers):
            return place
    return place


def traceback_of(error: BaseException) -> list[Place]:
    """The places an exception passed through, outermost first."""
    return _places(traceback.walk_tb(error.__traceback__))


def _places(frames) -> list[Place]:
    return [Place(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def parse_stack_dump(text: str) -> list[Place]:
    """The main thread's stack in a text that ends with a dump of faulthandler, outermost first: of
    all threads the main one is written last."""
    block = re.split(r"^(?:Current t|T)hread 0x.*$", text, flags=re.M)[-1]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, flags=re.M)
    return [Place(name, int(line), function) for name, line, function in found][::-1]


def steps_to_caller() -> int:
    """How many frames up the first one outside of labs is: a `stacklevel` for warnings."""
    stack = _places(traceback.walk_stack(sys._getframe(1)))
    return next((steps for steps, place in enumerate(stack, 1) if not place.is_ours), len(stack))


def _cell(filename) -> str | None:
    """`In [3]` for the source of a notebook cell, or None. A cell's file exists nowhere, and only
    a private map of ipykernel's knows its execution count."""
    try:
        shell = sys.modules["IPython"].get_ipython()
        return f"In [{shell.compile._filename_map[filename]}]"
    except Exception:
        return None
