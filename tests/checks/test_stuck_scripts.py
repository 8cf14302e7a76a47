"""Scripts whose ranks wait for each other are stopped soon, and told where; slow ones are not."""

import re

import pytest

from labs.checks.scripts import forked, run_end
from labs.checks.verdicts import Wrong
from labs.workers import programs, reports

pytestmark = pytest.mark.usefixtures("warm_launcher")
BEGIN = """\
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
group, rank, one = dist.new_group(), dist.get_rank(), torch.ones(1)
dist.all_reduce(one)
"""
GATHER = "dist.all_gather([torch.ones(1) for _ in range(2)], one, group=group)"

STUCK = {
    "rank 0 alone gathers before the end": (
        f"if rank == 0:\n    {GATHER}\ndist.barrier()\n",
        "waited in all_gather at script.py line 6; rank 1 .* barrier at script.py line 7"),
    "rank 1 alone sends": (
        "if rank == 1:\n    dist.send(one, 0)\ndist.barrier()\n",
        "barrier at script.py line 7; rank 1 .* send at script.py line 6"),
    "rank 0 waits for what nobody sends": (
        "if rank == 0:\n    work = dist.irecv(one, 1)\n    work.wait()\ndist.barrier()\n",
        "recv at script.py line 7; rank 1 .* barrier at script.py line 8"),
    "backward of DDP on rank 1 alone": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(1, 1))\nif rank == 1:\n    model(one).sum().backward()\n"
        "dist.barrier()\n",
        "barrier at script.py line 9; rank 1 .* all_reduce at script.py line 8")}
ALONE = {
    "gathers": (f"if rank == 0:\n    {GATHER}\n",
                "rank 0, line 6 .* rank 1 had ended; it had last called all_gather"),
    "meets at a barrier": ("if rank == 0:\n    time.sleep(0.3)\n    dist.barrier()\n",
                           "rank 0, line 7 .* rank 1 had ended; it had last called barrier"),
    "sends": ("if rank == 1:\n    time.sleep(0.3)\n    dist.send(one, 0)\n",
              "rank 1, line 7 .* rank 0 had ended")}
SLOW = {
    "rank 0 writes when the others have left": "if rank == 0:\n    time.sleep(5)\n",
    "rank 0 writes while the others wait": "if rank == 0:\n    time.sleep(5)\ndist.barrier()\n",
    "rank 0 evaluates when the others have left":
        "until = time.monotonic() + 4\nwhile rank == 0 and time.monotonic() < until:\n    pass\n"}


@pytest.fixture
def end_of(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "QUIET", 1.5)

    def ended(text):
        path = tmp_path / "script.py"
        path.write_text(BEGIN + text)
        found = forked.run(path, (), 2, option=None)
        try:
            run_end.judge_end(found, "2 ranks")
        except Wrong as wrong:
            return found, wrong
        raise AssertionError("no script here takes a step of an optimizer")

    return ended


@pytest.mark.parametrize("name", STUCK)
def test_ranks_that_wait_for_each_other_are_told_where(end_of, name):
    text, where = STUCK[name]
    found, wrong = end_of(text)
    assert wrong.code == "never_ends" and found.seconds < forked.SECONDS / 2
    assert re.search(where, str(wrong))


@pytest.mark.parametrize("name", ALONE)
def test_a_rank_that_waits_for_those_that_have_ended_is_told_so(end_of, name):
    text, where = ALONE[name]
    _, wrong = end_of(text)
    assert wrong.code == "left_alone"
    assert re.search(where, str(wrong))


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_rank_is_not_accused(end_of, monkeypatch, name):
    monkeypatch.setattr(programs, "STALL", 1.5)
    found, wrong = end_of(SLOW[name])
    assert found.code == 0 and wrong.code == "missing_step"


def test_a_rank_that_sleeps_for_ever_is_stopped(end_of, monkeypatch):
    monkeypatch.setattr(programs, "ASLEEP", 2.0)
    found, wrong = end_of("if rank == 0:\n    time.sleep(1000)\ndist.barrier()\n")
    assert wrong.code == "never_ends" and found.seconds < forked.SECONDS / 2
    assert found.waiting == ["was at script.py line 6, in no collective",
                             "waited in barrier at script.py line 7"]
