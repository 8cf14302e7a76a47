"""What tests of wrong answers share: how a verdict is held to its words, and several answers to one
exercise judged in one launch, because to launch ranks, and what torch does once for each process,
takes longer than many a check.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import cloudpickle
import gate
import pytest
import torch
import torch.distributed as dist

from labs.checks.verdicts import Verdict
from labs.workers.launcher import launch

LONGEST = 300.0  # seconds of a launch that judges many answers, on a busy machine

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def named(**answers: tuple) -> list:
    """A table of answers for `parametrize`: name=(answer, expected); its cases have these names."""
    return [pytest.param(*row, id=name) for name, row in answers.items()]


def is_rejected(verdict: Verdict, expected: str) -> bool:
    """Whether the verdict is that the answer is wrong, for this reason.

    expected: the verdict's code, and where answers of an exercise that have the same one must be
    told apart, a word of what it says: "wrong_traffic 3Ψ". Where drawn cases decide which of two
    mistakes shows first, both codes: "does_not_fit|slower_choice".
    """
    codes, _, word = expected.partition(" ")
    return (verdict.passed is False and verdict.code in codes.split("|") and word in str(verdict)
            and "Traceback" not in verdict.sentence)


def assert_rejected(verdict: Verdict, expected: str) -> None:
    """The verdict is that the answer is wrong, for the expected reason: see `is_rejected`."""
    assert is_rejected(verdict, expected), f"expected {expected}, not {verdict.code}: {verdict}"


def with_changes(text: str, *pairs: tuple[str, str]) -> str:
    """A script in which every `old` of each (old, new) is `new`; each must be there."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def assert_waits(check: Callable, exercise: str, functions: int = 1) -> None:
    """An answer, of so many functions, that is not filled in yet is waited for."""
    def unfilled(*_, **__):
        raise NotImplementedError(f"Exercise {exercise}")

    verdict = check(*[unfilled] * functions)
    assert verdict.passed is None and exercise in str(verdict), str(verdict)


def judge_in_one_launch(check: Callable, answers: Sequence[tuple], ranks: int) -> list[Verdict]:
    """Returns the verdict on each answer, a tuple of the check's arguments, of a check that starts
    its ranks with `on_ranks`. What it wants to launch on another number of ranks is left out.

    Not for an answer that ends a launch, by a mismatch of collectives or an error on some ranks
    only, nor for one that changes torch or the labs for those after it.
    """
    # as a check's launch, one answer may hang; here, so many are judged by one
    return launch(_judge_all, check, answers, ranks=ranks, quiet=True, device="cpu",
                  timeout=LONGEST)[0]


def _judge_all(check, answers):
    """On a rank: the verdict on each answer, by a check that finds itself on as many ranks as it
    wants to launch."""
    def here(work, *args, ranks, **_):
        return [work(*args)] if ranks == dist.get_world_size() else []

    verdicts, random_numbers = [], torch.get_rng_state()
    with mock.patch.object(sys.modules["labs.checks.on_ranks"], "launch", here):
        for answer in answers:
            torch.set_rng_state(random_numbers)  # as on a rank that has just been launched
            verdicts.append(check(*answer))
            gc.collect()  # models of the answer before are in cycles of hooks
    return verdicts


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set:
    """The values that a parameter has in those tests of this file that are run: a fixture that
    judges answers in one launch leaves out what nobody asks for."""
    return {item.callspec.params[parameter] for item in request.session.items
            if item.path == request.path and hasattr(item, "callspec")
            and parameter in item.callspec.params}


def judge_all(check: Callable, wrong: Sequence[tuple], right: Sequence, ranks: int) -> None:
    """Asserts, in one launch, that each wrong answer is rejected for its reason, and each right one
    accepted; in the gate, some of them. wrong: (answer, expected), as of `is_rejected`; an answer
    that is no tuple is the check's only argument."""
    wrong, right = gate.some_of(wrong), gate.some_of(list(right), 1)
    as_tuple = [answer if isinstance(answer, tuple) else (answer,)
                for answer in [*(answer for answer, _ in wrong), *right]]
    verdicts = judge_in_one_launch(check, as_tuple, ranks)
    unlike = [(expected, verdict) for (_, expected), verdict in zip(wrong, verdicts, strict=False)
              if not is_rejected(verdict, expected)]
    refused = [verdict for verdict in verdicts[len(wrong):] if not verdict.passed]
    assert not unlike and not refused, "\n\n".join(
        [f"expected {expected}\nfound    {verdict.code}: {verdict}"
         for expected, verdict in unlike]
        + [f"a right answer: {verdict}" for verdict in refused])
