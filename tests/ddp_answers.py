"""What the tests of notebook 02's wrong answers share: the solution in pieces that a wrong answer
replaces, and how a verdict is held to its words. `pytest -s` prints each verdict:

    pytest -q -s tests/manual_ddp | grep →
"""


import time

import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, judge_in_one_launch

import labs.manual_ddp as lab
from labs.training.presets import preset

ALONE = "alone"
IN_THE_KERNEL = (lab.check_combine, lab.check_make_buckets)  # start no ranks

right = definitions("02_manual_ddp", PRESET=preset("laptop"))
broadcast_state, make_buckets = right.broadcast_state, right.make_buckets
start, finish, OverlappedDDP = right.start, right.finish, right.OverlappedDDP


def N():
    return dist.get_world_size()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def zeros(parameters):
    """The parameters, each with a gradient: zeros where it was None."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return parameters


def zeros_for_none(model):
    return zeros(trainable(model))


def flattened(bucket):
    return torch.cat([p.grad.flatten() for p in zeros(bucket)])


def pieces(bucket, flat):
    return flat.split([parameter.numel() for parameter in bucket])


def give(bucket, flat):
    """Gives each parameter its piece of a flat gradient."""
    for parameter, piece in zip(bucket, pieces(bucket, flat), strict=True):
        parameter.grad = piece.view_as(parameter)


def finish_after_sleeping(bucket, flat, handle):
    """Sleeps for longer than any rank is delayed, instead of handle.wait()."""
    time.sleep(0.5)
    give(bucket, flat / N())


def wrapping(kind):
    """wrap(model, cap_bytes) for a class over lab.BucketedWrapper."""
    def wrap(model, cap_bytes=800_000):
        broadcast_state(model)
        return kind(model, make_buckets(model.parameters(), cap_bytes))

    return wrap


def rejected(verdict, expected):
    print(f"\n→ {verdict}")
    assert_rejected(verdict, expected)


def accepted(verdict):
    assert verdict.passed is True, verdict


class Answers:
    """Answers to exercises, judged when they are asked for: those of one check that are tried at
    all in one launch for each number of ranks, because a launch takes longer than a check.

    rows: (check, answers, words) or (check, answers, words, ALONE). An answer that ends a launch,
    by a mismatch of collectives or an error on some ranks only, has a launch of its own.
    """

    def __init__(self, rows, ranks=(3,)):
        self.rows = [(check, answer if isinstance(answer, tuple) else (answer,), *more)
                     for check, answer, *more in rows]
        self.ranks, self._verdicts = ranks, {}

    @property
    def parameters(self):
        return {"argvalues": range(len(self.rows)), "ids": [
            "-".join([check.__name__.removeprefix("check_"), *(
                getattr(answer, "__name__", "") for answer in answers), str(number)])
            for number, (check, answers, *_) in enumerate(self.rows)]}

    def verdict(self, number, request):
        """The verdict on a row; request: pytest's, of a test whose parameter `number` is."""
        check, answers, *more = self.rows[number]
        if check in IN_THE_KERNEL or ALONE in more:
            return check(*answers)
        if check not in self._verdicts:
            asked = {item.callspec.params["number"] for item in request.session.items
                     if item.nodeid.partition("[")[0] == request.node.nodeid.partition("[")[0]}
            mine = [row[1] for number, row in enumerate(self.rows)
                    if number in asked and row[0] is check and ALONE not in row]
            by_size = [judge_in_one_launch(check, mine, ranks) for ranks in self.ranks]
            self._verdicts[check] = {
                _key(each): min(verdicts, key=lambda verdict: verdict.passed)  # False before True
                for each, verdicts in zip(mine, zip(*by_size, strict=True), strict=True)}
        return self._verdicts[check][_key(answers)]


def _key(answers):
    return tuple(map(id, answers))
