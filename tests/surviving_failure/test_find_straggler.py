"""What the check of exercise 8.11 must reject, and what it must accept."""

import sys
from statistics import mean, median

import cloudpickle
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab
from labs.surviving_failure import find_straggler as straggler_jobs

cloudpickle.register_pickle_by_value(sys.modules[__name__])
right = definitions("08_surviving_failure")


# 8.11 find_straggler


def always(*answer):
    return lambda timings: answer or None


def parts(timings, names=("data", "compute", "collectives")):
    return [[sum(getattr(step, name) for name in names) for step in own] for own in timings]


def longest_step(timings):
    totals = [sum(own) for own in parts(timings)]
    return totals.index(max(totals)), "compute", 0


def waits_most(timings):
    found = right.find_straggler(timings)
    waits = [sum(own) for own in parts(timings, ("collectives",))]
    return found and (waits.index(max(waits)), *found[1:])


def waits_least(timings):
    found = right.find_straggler(timings)
    waits = [median(own[-10:]) for own in parts(timings, ("collectives",))]
    return found and (waits.index(min(waits)), *found[1:])


def but(change):
    """The right answer, changed."""
    def find_straggler(timings):
        found = right.find_straggler(timings)
        return found and change(*found)
    return find_straggler


def by_its_own_past(timings):
    """Compares no ranks: whoever computes longer than at the beginning."""
    for cause in ("compute", "data"):
        for rank, own in enumerate(parts(timings, (cause,))):
            extra = [each - median(own[:10]) for each in lab.smooth(own)]
            if extra[-1] > 0.02:
                return rank, cause, next(at for at, each in enumerate(extra) if each > 0.02)
    found = right.find_straggler(timings)
    return found if found and found[1] == "link" else None


def by_ratio(timings):
    """Twice as long as the others, however little that is."""
    for cause in ("data", "compute"):
        means = [median(own[-10:]) for own in parts(timings, (cause,))]
        for rank, own in enumerate(means):
            if own > 1.4 * median(means[:rank] + means[rank + 1:]):
                found = right.find_straggler(timings)
                return rank, cause, found[2] if found else 0
    return right.find_straggler(timings)


def by_mean(timings):
    """The mean over all steps: a single one decides."""
    for cause in ("compute", "data"):
        means = [mean(own) for own in parts(timings, (cause,))]
        for rank, own in enumerate(means):
            if own - median(means[:rank] + means[rank + 1:]) > 0.02:
                found = right.find_straggler(timings)
                return rank, cause, found[2] if found else 0
    return right.find_straggler(timings)


def one_late_step(timings):
    """Since the first step that is longer, outlier or not."""
    found = right.find_straggler(timings)
    if found is None or found[1] == "link":
        return found
    rank, cause, since = found
    own = parts(timings, (cause,))
    others = [median(same) for same in zip(*own[:rank], *own[rank + 1:], strict=True)]
    return rank, cause, next(at for at, other in enumerate(others)
                             if own[rank][at] - other > 0.05)


def link_first(timings):
    """Anybody is in collectives longer: the link."""
    most = [max(step.collectives for step in same) for same in zip(*timings, strict=True)]
    late = [each > 1.3 * median(most[:10]) for each in lab.smooth(most)]
    if late[-1]:
        return None, "link", max(at for at, is_late in enumerate(late) if not is_late) + 1
    return right.find_straggler(timings)


def no_link(timings):
    found = right.find_straggler(timings)
    return found if found and found[1] != "link" else None


def has_recovered(timings):
    """Never looks whether it is still slow."""
    kept = [own[:24] for own in timings] if len(timings[0]) == 45 else timings
    return right.find_straggler(kept)


def least_five(since_when):
    """The right answer, but for a straggler of any length that `since_when(late)` finds."""
    def find_straggler(timings):
        usual = median(parts(timings)[0])
        for cause in ("compute", "data"):
            seconds = parts(timings, (cause,))
            for rank, own in enumerate(seconds):
                others = zip(*seconds[:rank], *seconds[rank + 1:], strict=True)
                extra = [mine - median(same) for mine, same in zip(own, others, strict=True)]
                since = since_when([late > usual / 10 for late in extra])
                if since is not None:
                    return rank, cause, since
        return right.find_straggler(timings)
    return find_straggler


@least_five
def one_is_enough(late):
    """A single slow step at the end is a straggler."""
    since = max((at for at, each in enumerate(late) if not each), default=-1) + 1
    return since if since < len(late) else None


@least_five
def three_are_enough(late):
    since = max((at for at, each in enumerate(late) if not each), default=-1) + 1
    return since if since <= len(late) - 3 else None


def empties(timings):
    found = right.find_straggler(timings)
    timings.clear()
    return found


def in_tensors(timings):
    """Tensors instead of lists; a list as the answer."""
    own = torch.tensor([[[step.data, step.compute, step.collectives] for step in rank]
                        for rank in timings], dtype=torch.float64)
    usual, steps = own.sum(2).median(), own.shape[1]

    def since(extra):
        windows = torch.nn.functional.pad(extra[None, None], (2, 2), mode="replicate")[0, 0]
        late = windows.unfold(0, 5, 1).median(1).values > usual / 10
        quiet = (~late).nonzero()
        first = int(quiet.max()) + 1 if len(quiet) else 0
        return first if first <= steps - 5 else None

    for part, cause in ((1, "compute"), (0, "data")):
        for rank in range(len(own)):
            others = torch.cat([own[:rank, :, part], own[rank + 1:, :, part]])
            at = since(own[rank, :, part] - others.quantile(0.5, dim=0))
            if at is not None:
                return [rank, cause, torch.tensor(at)]
    least = own[:, :, 2].min(0).values
    at = since(least - least[:10].median())
    return None if at is None else [None, "link", at]


WRONG_STRAGGLER = [
    (always(), "nothing_returned"),
    (always(2, "compute"), "wrong_count"),
    (always(2, "slow", 20), "unknown_name 'slow'"),
    (always(2, "compute", 20), "no_straggler"),
    (longest_step, "wrong_straggler|no_straggler"),
    (waits_most, "wrong_straggler"),
    (waits_least, "wrong_straggler"),
    (but(lambda rank, cause, since: (rank, "compute", since)), "wrong_straggler"),
    (but(lambda rank, cause, since: (rank, cause, 0)), "wrong_step"),
    (but(lambda rank, cause, since: (rank, cause, since + 3)), "wrong_step"),
    (but(lambda rank, cause, since: (rank, cause, since + 1)), "wrong_step"),
    (but(lambda rank, cause, since: (rank, cause, max(0, since - 2))), "wrong_step"),
    (one_is_enough, "no_straggler|wrong_step"), (three_are_enough, "no_straggler|wrong_step"),
    (but(lambda rank, cause, since: (rank or 0, cause, since)), "wrong_straggler"),
    (but(lambda rank, cause, since: (str(rank), cause, since)), "wrong_type numbers"),
    (by_its_own_past, "nothing_returned|wrong_straggler|no_straggler"), (by_ratio,
     "wrong_straggler|no_straggler|wrong_step"),
    (by_mean, "no_straggler|wrong_straggler|wrong_step"), (one_late_step, "wrong_step"),
    (link_first, "wrong_straggler"), (no_link, "nothing_returned slower"),
    (has_recovered, "no_straggler|nothing_returned|wrong_step"), (empties, "changes_input timings")]
RIGHT_STRAGGLER = [right.find_straggler, in_tensors]


@pytest.fixture
def no_recording(monkeypatch):
    """The synthetic jobs alone."""
    monkeypatch.setattr(straggler_jobs, "recorded_stragglers", dict)


@pytest.mark.parametrize(("answer", "words"), WRONG_STRAGGLER)
def test_wrong_stragglers(answer, words, no_recording):
    verdict = lab.check_find_straggler(answer)
    print(verdict)
    assert_rejected(verdict, words)


@pytest.mark.parametrize("answer", RIGHT_STRAGGLER)
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_right_stragglers(answer, seed, no_recording, monkeypatch):
    monkeypatch.setenv("WORKBOOK_SEED", seed)
    verdict = lab.check_find_straggler(answer)
    assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits(no_recording, warm_launcher):
    assert_waits(lab.check_find_straggler, "8.11")
