"""Rules that answers of notebook 09 follow in place of the right one, to name what is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labs.checks.verdicts import Wrong


@dataclass(frozen=True)
class OtherRule:
    """A known way to compute something else. result(case): the tensor that it leads to.
    sentence: continues after what was judged and a colon."""

    code: str
    result: Callable[[Any], torch.Tensor]
    sentence: str
    hint: str = ""

    def wrong(self, what: str) -> Wrong:
        """What a check raises where an answer follows this rule."""
        return Wrong(f"{what}: {self.sentence}", self.hint, code=self.code)


def rule_of(rules: Sequence[OtherRule], cases: Sequence, answers: Sequence[torch.Tensor],
            same: Callable[[torch.Tensor, torch.Tensor], bool]) -> OtherRule | None:
    """The first rule that leads to every answer, the right ones too: in some cases a wrong rule
    leads to the right result. None where there is none. answers: one for each case."""
    return next((rule for rule in rules if all(
        same(answer, rule.result(case)) for case, answer in zip(cases, answers, strict=True))),
        None)
