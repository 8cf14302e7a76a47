"""Programs that are started for a check: what of them is still there, and whether it computes."""

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
