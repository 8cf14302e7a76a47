"""Programs that are started for a check: what of them is still there, and whether it computes."""

import os
import subprocess
import sys
import time

import pytest

from labs.workers import programs

COMPUTES = "while True: pass"
SLEEPS = "import time; time.sleep(60)"


@pytest.mark.parametrize("own_group", [True, False])
def test_a_process_counts_before_it_has_a_group_of_its_own(own_group):
    with subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=own_group) as process:
        try:
            assert list(programs.alive([process.pid])) == [process.pid]
        finally:
            process.kill()


@pytest.mark.slow
def test_what_computes_is_not_stalled_and_what_sleeps_is(monkeypatch):
    monkeypatch.setattr(programs, "STALL", 1.5)
    over = {}
    for program in (COMPUTES, SLEEPS):
        with subprocess.Popen([sys.executable, "-c", program]) as process:
            watch = programs.StallWatch(lambda process=process: [process.pid], limit=6)
            while not watch.is_over():
                time.sleep(0.05)
            over[program] = watch.seconds
            process.kill()
    assert over[SLEEPS] < 6 <= over[COMPUTES]


@pytest.mark.slow
def test_what_gets_no_core_is_not_stalled(monkeypatch):
    """Behind two others on its core, and with the lowest priority, it computes for 1 % of the time.
    """
    monkeypatch.setattr(programs, "STALL", 1.5)
    core = min(os.sched_getaffinity(0))
    started = [subprocess.Popen([sys.executable, "-c", (
        f"import os; os.sched_setaffinity(0, [{core}]); os.nice({nice})\n{COMPUTES}")])
        for nice in (0, 0, 19)]
    try:
        watch = programs.StallWatch(lambda: [started[-1].pid], limit=5)
        while not watch.is_over():
            time.sleep(0.05)
        assert watch.seconds >= 5
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_what_ended_processes_computed_is_not_missing(monkeypatch):
    monkeypatch.setattr(programs, "STALL", 2.0)
    times = [{1: 9.0, 2: 0.0}, {2: 0.4}, {2: 0.8}, {2: 1.2}, {2: 1.2}]
    over = watched(monkeypatch, [{(process, process): programs._Thread(seconds)
                                  for process, seconds in each.items()} for each in times])
    assert over == [False, False, False, False, True]


@pytest.mark.parametrize("ran, works", [(0.01, False), (0.05, True)])
def test_threads_of_gloo_that_look_for_data_do_not_compute(monkeypatch, ran, works):
    """Twenty of them wait for a core together as long as one thread that works."""
    monkeypatch.setattr(programs, "STALL", 2.0)
    looks = [{(1, thread): programs._Thread(ran * look, 0.05 * look, is_ready=True, is_gloos=True)
              for thread in range(20)} for look in range(1, 6)]
    assert watched(monkeypatch, looks)[-1] is not works


def watched(monkeypatch, looks):
    """What a watch says at each look at the threads, each 1.5 s after the one before."""
    monkeypatch.setattr(programs, "alive", lambda _: [])
    monkeypatch.setattr(programs, "_threads", lambda _: looks.pop(0))
    now, over = 100.0, []
    monkeypatch.setattr(programs.time, "monotonic", lambda: now)
    watch = programs.StallWatch(lambda: [])
    for now in (101.5, 103.0, 104.5, 106.0, 108.1):  # noqa: B007, what the clock says
        over.append(watch.is_over())
    return over
