"""Scripts that exercise 3.11 must reject, and right ones written differently."""

import pytest
from answers import assert_rejected, with_changes

import labs.zero_stages as lab
from labs.checks.scripts import files
from labs.workers import programs

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("zero1.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


OWN = "        own = [p for p in self.parameters if self.owner[p] == dist.get_rank()]\n"
MEAN = "            parameter.grad /= dist.get_world_size()\n"
REDUCE = "            dist.reduce(parameter.grad, dst=self.owner[parameter])\n"
STEP = "        self.inner.step()\n"
SEND = """        for parameter in self.parameters:
            dist.broadcast(parameter.detach(), src=self.owner[parameter])
"""
ASSIGN = """            self.owner[parameter] = held.index(min(held))
"""

WRONG = {
    "the loader drops": (changed(("sampler=sampler)", "sampler=sampler, drop_last=True)")),
                         "samples_lost drop_last"),
    "all own all": (changed((OWN, "        own = self.parameters\n")), "owned_by_many"),
    "rank 0 owns all": (changed((ASSIGN, "            self.owner[parameter] = 0\n"),
                                (OWN, OWN + "        own = own or [torch.nn.Parameter(torch.zeros(1"
                                      "))]\n")), "uneven_shares"),
    "one parameter is left out": (changed((OWN, OWN + "        own = own[:-1]\n")),
                                  "owned_by_none"),
    "not sent": (changed((SEND, "")), "replicas_differ|wrong_update"),
    "sum": (changed((MEAN, "")), "wrong_gradient sum"),
    "averaged twice": (changed((MEAN, 2 * MEAN)), "wrong_gradient twice"),
    "own samples": (changed((REDUCE, ""), (MEAN, "            pass\n")), "wrong_gradient alone"),
    "gradients are only scaled": (changed((REDUCE, "")), "wrong_gradient"),
    "updated before the reduction": (
        changed((STEP, ""), ("    def step(self):\n", "    def step(self):\n" + STEP)),
        "wrong_gradient alone"),
    "SGD": (changed(("torch.optim.AdamW(own", "torch.optim.SGD(own")), "wrong_update"),
    "updated twice": (changed((STEP, 2 * STEP)), "step_without_batch"),
    "an own order on each rank": (
        changed((ASSIGN, "            self.owner[parameter] = dist.get_rank()\n")),
        "never_ends|owned_by_many|rank_failed")}

RIGHT_ONES = {
    "worked": RIGHT,
    "all-reduced": changed((REDUCE, "            dist.all_reduce(parameter.grad)\n")),
    "divided after": changed((MEAN, ""), (REDUCE, REDUCE + MEAN)),
    "by turns": changed((ASSIGN, "            self.owner[parameter] = "
                         "len(self.owner) % dist.get_world_size()\n")),
    "torch's": changed(
        ("        self.inner = torch.optim.AdamW(own, lr=lr)\n",
         "        self.inner = torch.distributed.optim.ZeroRedundancyOptimizer(\n"
         "            self.parameters, torch.optim.AdamW, lr=lr)\n"),
        (REDUCE, "            dist.all_reduce(parameter.grad)\n"), (SEND, ""),
        ("import torch\n", "import torch\nimport torch.distributed.optim\n"))}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "STALL", 6.0)

    def judged(script):
        (tmp_path / "zero1.py").write_text(script)
        return lab.check_zero1_script("zero1.py")

    return judged


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_is_rejected(check, name):
    script, expected = WRONG[name]
    assert_rejected(check(script), expected)


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_a_right_script_passes(check, name):
    verdict = check(RIGHT_ONES[name])
    assert verdict.passed, str(verdict)


def test_a_gap_and_a_missing_file_wait(check):
    assert lab.check_zero1_script("none.py").passed is None
    verdict = check(RIGHT + '\nraise NotImplementedError("Exercise 3.11")\n')
    assert verdict.passed is None and "3.11" in str(verdict)
