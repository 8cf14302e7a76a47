"""Every fault of the table, in this process and in the cells of a live kernel."""

import re
import time

import pytest
from faults import faulty
from faults.table import FAULTS

import labs
from labs import launch

TRIES = 3  # other tests run beside these, so a launch may be late by chance
ROWS = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@pytest.mark.sample(4)
@ROWS
def test_from_a_script(fault, next_launch_works, capfd, recwarn):
    def run():
        if fault.error is None:
            assert launch(fault.function, **{"ranks": 2, **fault.options}) == fault.result
            return capfd.readouterr().out + "".join(f"{w.category.__name__}: {w.message}\n"
                                                    for w in recwarn)
        with pytest.raises(labs.LaunchError) as caught:
            launch(fault.function, **{"ranks": 2, **fault.options})
        assert len(str(caught.value)) < 5_000
        return f"{caught.type.__name__}: {caught.value}"

    shown = in_time(run, fault)
    assert_says(fault, shown)
    if fault.guilty_line:
        line = fault.function.__code__.co_firstlineno + fault.line - 1
        assert f"faulty.py line {line}" in shown, shown


@pytest.mark.slow  # --fast runs some as a script
@ROWS
def test_from_a_cell(fault, in_kernel):
    in_kernel.run(fault.source)
    options = "".join(f", {name}={value}" for name, value in {"ranks": 2, **fault.options}.items())
    cell = f"result = launch({fault.name}{options})\nprint(result)"
    shown, error = in_time(lambda: in_kernel.run(cell), fault)
    if fault.error is None:
        assert error is None, error
        assert str(fault.result) in shown
        assert len(shown) < 200_000
    else:
        assert error is not None, shown
        assert "labs/workers" not in error and "Traceback" not in error
        shown = error
    assert_says(fault, shown)
    if fault.guilty_line:
        assert re.search(rf"In \[\d+\] line {fault.line}\b", shown), shown


def in_time(run, fault):
    """What run() returns when it ends within the fault's seconds, in one of TRIES attempts."""
    for _ in range(TRIES):
        began = time.monotonic()
        found = run()
        seconds = time.monotonic() - began
        if seconds < fault.within:
            return found
    pytest.fail(f"{seconds:.1f} s, and in each attempt more than {fault.within}")


def assert_says(fault, shown):
    shown = " ".join(shown.split())  # a notebook wraps long lines
    for piece in (*fault.message_parts, f"{fault.error}: " if fault.error else ""):
        assert " ".join(piece.split()) in shown, shown


def test_out_of_memory_is_data_too(next_launch_works):
    with pytest.raises(labs.OutOfMemory) as caught:
        launch(faulty.wants_too_much_on_one, ranks=2, memory_limit=2e8, quiet=True)
    error = caught.value
    assert (error.rank, error.asked, error.allowed) == (1, 400_000_000, 200_000_000)
    assert 0 <= error.held < 200_000_000
    assert error.oom_by_rank == {1: error.outcomes[1].oom}


def test_the_output_of_a_failed_launch_is_kept(next_launch_works):
    def work():
        print("this far")
        raise ValueError

    with pytest.raises(labs.RankFailed):
        launch(work, ranks=2, quiet=True)
    assert labs.last_failure().output == ["this far\n"] * 2
