"""How busy threads are: idle wake-ups on a crowded machine, told from moving data and computing."""

import pytest

from labs.workers import activity
from labs.workers.activity import ActivityLog, Busy


def busy(at, gloo_ran, delayed):
    """15 threads of gloo; `delayed`: seconds that all of them together have waited for a core."""
    ran = dict.fromkeys(range(15), gloo_ran)
    together = sum(ran.values()) + delayed
    return Busy(together, ran, others=together, others_ran=ran, starved=0.0, at=at)


@pytest.mark.parametrize(("ran", "delayed", "is_idle"), [
    (0.0001, 0.0, True), (0.001, 0.07, True),  # 0.4 % of 0.25 s, and 26 % with a load of 10
    (0.02, 0.0, False), (0.005, 0.2, False)])  # alone on the machine; between many others
def test_wake_ups_are_no_work(monkeypatch, ran, delayed, is_idle):
    moments = iter([busy(0.0, 0.0, 0.0), busy(0.25, ran, delayed)])
    monkeypatch.setattr(activity, "measure", lambda: next(moments))
    log = ActivityLog()
    log.update()
    # all threads, too: or a wait in C++, as DDP's backward, would look like work for ever
    assert log.gloo_idle_since == log.idle_since == (0.0 if is_idle else 0.25)
