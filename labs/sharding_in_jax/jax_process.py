"""Runs a function in a process of its own that has JAX and a number of CPU devices, shows what it
prints, and brings back what it returns."""

import importlib.util
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from labs.checks.scripts.commands import run_module
from labs.checks.student_code import shortened
from labs.checks.verdicts import Verdict
from labs.pictures.in_scripts import print_in_script
from labs.sharding_in_jax.jax_child import RESULT, WORK, Raised
from labs.workers import processes
from labs.workers.output import last_lines
from labs.workers.pickling import CannotSend
from labs.workers.source_lines import Place

VERSION = "0.10.2"  # as the extra `jax` in pyproject.toml
NOT_INSTALLED = (f"waits for JAX, which is not installed: run %pip install jax=={VERSION} in a "
                 "cell of its own (500 MB on disk), then this cell again; nothing else needs JAX")
SECONDS = 120.0  # that a function may take, on a busy machine; else JAX has started after two
# No search for GPUs or TPUs, and no message of XLA below an error.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}


def has_jax() -> bool:
    """Whether JAX is installed: the extra `jax`. Does not import it."""
    return importlib.util.find_spec("jax") is not None


def run_jax(function: Callable, *args, devices: int = 4, seconds: float = SECONDS) -> Any:
    """What `function(*args)` returns in a new Python process in which JAX has so many CPU devices;
    what it prints is shown. Arrays come back as NumPy's.

    function: may be defined in a cell; it imports jax itself. Returns a Verdict where JAX is not
    installed, where the function raises, waits for an exercise, or takes more than `seconds`.
    Raises Stopped where it is interrupted. No process is left behind.
    """
    found = in_jax_process(function, *args, devices=devices, seconds=seconds)
    return print_in_script(found) if isinstance(found, Verdict) else found


def in_jax_process(function: Callable, *args, devices: int, seconds: float = SECONDS) -> Any:
    """As `run_jax`, for checks and pictures: leaves it to them to show a Verdict."""
    if not has_jax():
        return Verdict("run_jax", None, NOT_INSTALLED)
    with processes.temporary_folder() as folder:
        Path(folder, WORK).write_bytes(_packed(function, args))
        run = run_module("labs.sharding_in_jax.jax_child", folder, devices,
                         seconds=seconds, environment=_ENVIRONMENT)
        result = Path(folder, RESULT)
        data = result.read_bytes() if result.exists() else b""
    # Before the missing result: a process that was stopped has written none, either.
    if run.code is None:
        return Verdict("run_jax", False, f"stopped: it took more than {seconds:g} s",
                       code="timed_out")
    if not data:
        return Verdict("run_jax", False, f"JAX's process ended with exit code {run.code}, and "
                       "returned nothing", printed="\n".join(last_lines(run.output, 10)),
                       code="process_failed")
    return _result(data)


def _packed(function, args) -> bytes:
    try:
        # cloudpickle: pickle refuses a function that was defined in a cell.
        return cloudpickle.dumps((function, args))
    except Exception as error:
        raise CannotSend("the function, or what it uses, cannot be sent to JAX's process: make it "
                         f"inside the function. ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    """Refuses what would import JAX into this process."""

    def find_class(self, module, name):
        if module.split(".")[0] in ("jax", "jaxlib"):
            raise _OfJax(f"{module}.{name}")
        return super().find_class(module, name)


class _OfJax(Exception):
    pass


def _result(data) -> Any:
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except _OfJax as error:
        return Verdict("run_jax", False, f"the function returned an object of JAX's own, a "
                       f"{error}: return numbers, texts or arrays, or print it",
                       code="cannot_return")
    return _verdict(found) if isinstance(found, Raised) else found


def _verdict(raised: Raised) -> Verdict:
    """What the function raised, with the student's line in which it happened."""
    if raised.kind == "NotImplementedError" and raised.message.startswith("Exercise "):
        return Verdict(raised.message.removeprefix("Exercise "), None, "is waiting for your code")
    own = [place for place in (Place(*place) for place in raised.places) if place.is_students]
    line = f"\n    {own[-1]}, in {own[-1].function}:  {own[-1].source}" if own else ""
    return Verdict("run_jax", False, shortened(f"{raised.kind}: {raised.message}", 1000, 10) + line,
                   code=f"raised_{raised.kind}")
