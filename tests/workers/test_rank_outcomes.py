"""The sentences that report what became of ranks, for one rank and for several."""

import multiprocessing.process
import sys
from types import SimpleNamespace

import pytest

from labs.workers import outcomes
from labs.workers.heartbeat import Heartbeat, Snapshot
from labs.workers.memory import OOMInfo
from labs.workers.outcomes import Kind, Outcome, describe, root_cause, summary, summary_now
from labs.workers.source_lines import Place

HERE = Place("/somewhere/train.py", 7, "train")
STARTED = Place(multiprocessing.process.__file__, 108, "run")  # which every rank has on its stack
OURS = Place(outcomes.__file__, 3, "main")
TORCHS = Place("/lib/site-packages/torch/nn/module.py", 9, "forward")


@pytest.mark.parametrize("fields, one, many", [
    ({"kind": Kind.STARTING}, "was still starting", "were still starting"),
    ({"kind": Kind.COMPUTING, "stack": [HERE]}, "computes at train.py line 7",
     "compute at train.py line 7"),
    ({"kind": Kind.COMPUTING, "stack": [STARTED, OURS]}, "computes, outside of your function",
     "compute, outside of your function"),
    ({"kind": Kind.COMPUTING, "stack": [STARTED, OURS, TORCHS]}, "computes at module.py line 9",
     "compute at module.py line 9"),
    ({"kind": Kind.COMPUTING, "stack": [STARTED, OURS, HERE, TORCHS, OURS]},
     "computes at train.py line 7", "compute at train.py line 7"),
    ({"kind": Kind.WAITING, "stack": [HERE], "collective": "all_reduce", "number": 2,
      "seconds": 3.2}, "waits in all_reduce (#2) at train.py line 7 for 3 s",
     "wait in all_reduce (#2) at train.py line 7 for 3 s"),
    ({"kind": Kind.MISMATCHED, "stack": [HERE], "collective": "barrier", "number": 1},
     "calls barrier (#1) at train.py line 7", "call barrier (#1) at train.py line 7"),
    ({"kind": Kind.OUT_OF_COLLECTIVES, "collective": "all_gather_object"},
     "calls no further collective: it has left your function",
     "call no further collective: they have left your function"),
    ({"kind": Kind.UNRESPONSIVE}, "does not answer: it is blocked in C++ code",
     "do not answer: they are blocked in C++ code"),
    ({"kind": Kind.SUSPENDED, "stack": [HERE]},
     "is suspended at train.py line 7: a signal (SIGSTOP) has stopped its process",
     "are suspended at train.py line 7: a signal (SIGSTOP) has stopped their processes"),
    ({"kind": Kind.RETURNED}, "already returned", "already returned"),
    ({"kind": Kind.RAISED, "error_type": "KeyError", "message": "'{a}'"}, "raised KeyError: '{a}'",
     "raised KeyError: '{a}'"),
    ({"kind": Kind.RAISED, "error_type": "ValueError"}, "raised ValueError", "raised ValueError"),
    ({"kind": Kind.OUT_OF_MEMORY, "oom": OOMInfo(8_000_000)},
     "ran out of memory: it asked for 8 MB; the machine has no more",
     "ran out of memory: each asked for 8 MB; the machine has no more"),
    ({"kind": Kind.LOST_CONNECTION}, "lost its connection: another rank had left",
     "lost their connection: another rank had left"),
    ({"kind": Kind.CALLED_EXIT, "message": "3"}, "called sys.exit(3)", "called sys.exit(3)"),
    ({"kind": Kind.PROCESS_EXITED, "exit_code": 3},
     "ended its process with exit code 3 before it returned (os._exit?)",
     "ended their processes with exit code 3 before they returned (os._exit?)"),
    ({"kind": Kind.OUT_OF_MEMORY_IN_CPP, "oom": OOMInfo(allowed=28_000_000)},
     "ran out of memory in C++ code, which gave up: it asked for more; its memory_limit is 28 MB",
     "ran out of memory in C++ code, which gave up: each asked for more; its memory_limit is 28 MB"
     ),
    ({"kind": Kind.KILLED, "exit_code": -11},
     "was killed by signal 11 (SIGSEGV): a crash in C++ code",
     "were killed by signal 11 (SIGSEGV): a crash in C++ code"),
], ids=lambda value: str(value.get("kind")) if isinstance(value, dict) else "")
def test_one_rank_and_several(fields, one, many):
    assert describe(Outcome(0, **fields)) == one
    assert describe(Outcome(0, **fields), ranks=2) == many


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_its_words(kind):
    outcome = Outcome(0, kind, message="said", exit_code=-9)
    assert "{" not in describe(outcome) + describe(outcome, 2)


def test_ranks_with_the_same_outcome_share_a_line_whatever_they_waited():
    waiting = {"kind": Kind.WAITING, "collective": "barrier", "number": 1}
    lines = summary([Outcome(0, **waiting, seconds=1.2), Outcome(1, Kind.RETURNED),
                     Outcome(2, **waiting, seconds=4)])
    assert lines == ["ranks 0 and 2 wait in barrier (#1) for 4 s", "rank 1 already returned"]


def test_what_ranks_do_now_is_one_line():
    def waiting(rank, number):
        return Outcome(rank, Kind.WAITING, collective="all_reduce", number=number, seconds=number,
                       stack=[HERE])

    found = [waiting(0, 7), Outcome(1, Kind.COMPUTING, stack=[HERE]), waiting(2, 8),
             Outcome(3, Kind.STARTING), Outcome(4, Kind.RETURNED)]
    assert summary_now(found) == (
        "rank 1 computes at train.py line 7 · rank 3 is still starting · "
        "ranks 0 and 2 wait in all_reduce at train.py line 7 · 1 other rank")
    assert summary_now(found[:1]) == "rank 0 waits in all_reduce at train.py line 7"
    everywhere = [Outcome(rank, Kind.COMPUTING, stack=[Place("/somewhere/train.py", rank, "train")])
                  for rank in range(64)]
    assert summary_now(everywhere) == ("rank 0 computes at train.py line 0 · rank 1 computes at "
                                       "train.py line 1 · rank 2 computes at train.py line 2 · "
                                       "61 other ranks")
    raised = Outcome(0, Kind.RAISED, error_type="ValueError", message="two\nlines")
    assert summary_now([raised]) == "rank 0 failed"


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_its_words_for_now(kind):
    assert "{" not in summary_now([Outcome(0, kind, message="said", exit_code=-9)])


def test_ranks_that_failed_like_the_first_did_the_same():
    raised = {"kind": Kind.RAISED, "error_type": "ValueError", "message": "bad"}
    root, *others = (Outcome(rank, **raised, stack=[HERE] * rank) for rank in range(3))
    assert summary([root, *others], root) == ["ranks 1 and 2 did the same"]


def test_a_death_is_to_blame_before_exceptions_and_these_before_lost_connections():
    lost, raised, died = (Outcome(rank, kind) for rank, kind in enumerate(
        [Kind.LOST_CONNECTION, Kind.RAISED, Kind.KILLED]))
    assert root_cause([lost, raised, died]) is died
    assert root_cause([lost, raised]) is raised
    assert root_cause([lost, Outcome(1, Kind.RETURNED)]) is lost
    assert root_cause([Outcome(0, Kind.WAITING)]) is None


def test_a_wait_that_ends_while_the_heartbeat_looks_is_none_or_has_a_beginning():
    class Leaving:
        """The main thread leaves its wait right after `began` was read."""

        name, needs_pending, polling_since = "wait", False, None
        times = iter([1.0])

        @property
        def began(self):
            return next(self.times, None)

    heart = SimpleNamespace(waits=Leaving())
    assert Heartbeat._wait(heart, Snapshot.of(sys._getframe()), None) == ("wait", 1.0)


@pytest.mark.parametrize(("line", "does"), [
    ("time.sleep(100)", "sleeps"), ("sleep(1); x = 2", "sleeps"), ("x = asleep(3)", "computes"),
    ("x = torch.ones(2)", "computes")])
def test_a_rank_at_a_line_that_sleeps_is_not_said_to_compute(tmp_path, line, does):
    file = tmp_path / "train.py"
    file.write_text(f"{line}\n")
    outcome = Outcome(0, Kind.COMPUTING, stack=[Place(str(file), 1, "train")])
    assert outcomes.describe(outcome) == f"{does} at train.py line 1"
