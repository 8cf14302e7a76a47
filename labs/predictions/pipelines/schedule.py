"""A pipeline schedule as data: for each rank the list of its actions, in the order in which it runs
them.

With p ranks and v chunks on each there are p·v stages. Placement is looped: stage s is chunk s // p
of rank s % p (Narayanan et al. 2021, section 2.2), so without chunks stage and rank are one number.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

MOST_ENTRIES = 1_000_000  # of a rank's list
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")  # the cells of torch.distributed.pipelining: stage first


class IllegalSchedule(ValueError):
    """A schedule that cannot be run; one sentence says which rank and action, and why. code: the
    kind of mistake, in one word or a few."""

    def __init__(self, sentence: str, code: str = "illegal_schedule"):
        super().__init__(sentence)
        self.code = code

    def __reduce__(self):  # an exception is pickled by its args alone, and a rank may raise it
        return type(self), (str(self), self.code)


@dataclass(frozen=True)
class Action:
    """What a rank does with one micro-batch and one of its stages.

    kind: "F", the forward; "B", the backward; "W", the gradient of the weights alone. Where there
    is a W for the same stage and micro-batch, B computes the gradient of the input only.
    """

    kind: str
    micro_batch: int
    stage: int


@dataclass(frozen=True)
class ChunkAction:
    """An action whose stage follows from the rank in whose list it stands."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __post_init__(self):
        for name in ("micro_batch", "chunk"):
            value = getattr(self, name)
            try:
                # operator.index accepts NumPy's integers and refuses 1.0; the dataclass is frozen.
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(f"{self.kind}: {name} is {value!r}, but must be a whole "
                                "number") from None

    def __repr__(self):
        return f"{self.kind}({self.micro_batch}{f', chunk={self.chunk}' if self.chunk else ''})"


def F(micro_batch: int, chunk: int = 0) -> ChunkAction:
    """The forward of a micro-batch through one chunk of the rank in whose list it stands."""
    return ChunkAction("F", micro_batch, chunk)


def B(micro_batch: int, chunk: int = 0) -> ChunkAction:
    """The backward of a micro-batch; if its W is listed, too, the gradient of the input only."""
    return ChunkAction("B", micro_batch, chunk)


def W(micro_batch: int, chunk: int = 0) -> ChunkAction:
    """The gradient of the chunk's weights for a micro-batch, separate from its B."""
    return ChunkAction("W", micro_batch, chunk)


@dataclass(frozen=True)
class Schedule:
    """ranks: the actions of each rank, in order. It may be illegal: `legality.first_illegal`."""

    ranks: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1

    @classmethod
    def from_lists(cls, lists: Sequence[Iterable], micro_batches: int,
                   chunks: int = 1) -> "Schedule":
        """The schedule of a list of F(i), B(i), W(i) for each rank. An entry may also be an Action
        or a text cell; None and "" are idle slots and are left out. Raises IllegalSchedule for what
        is not made of actions."""
        if not isinstance(lists, list | tuple) or not lists:
            found = type(lists).__name__ if lists or lists is None else "something empty"
            raise IllegalSchedule("a schedule is a list with one list of actions for each rank, "
                                  f"not {found}", "wrong_type")
        return cls(tuple(_actions(entries, rank, len(lists)) for rank, entries in enumerate(lists)),
                   micro_batches, chunks)

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """The schedule of a line for each rank with cells like `0F0,1I2,1W2`: the stage, F, B (the
        whole backward), I (the gradient of the input) or W, the micro-batch; an empty cell is an
        idle slot. torch.distributed.pipelining writes and reads this. Raises IllegalSchedule."""
        lines = [line.split(",") for line in text.strip().splitlines()]
        lists = [[_cell(cell.strip(), rank) for cell in cells if cell.strip()]
                 for rank, cells in enumerate(lines)]
        every = [action for _, action in sum(lists, [])]
        if not every:
            raise IllegalSchedule("there is no action in the text")
        _require_split(lists)
        last = max(action.stage for action in every)
        return cls(tuple(tuple(action for _, action in cells) for cells in lists),
                   1 + max(action.micro_batch for action in every), last // len(lists) + 1)

    def to_text(self) -> str:
        """The schedule as `from_text` reads it, a line for each rank."""
        return "\n".join(",".join(map(self._to_cell, actions)) for actions in self.ranks)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.ranks) * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that has this stage."""
        return stage % len(self.ranks)

    @cached_property
    def everything(self) -> frozenset[Action]:
        """All actions of all ranks."""
        return frozenset(action for actions in self.ranks for action in actions)

    def is_split(self, stage: int, micro_batch: int) -> bool:
        """Whether the gradient of the weights is an action of its own, W."""
        return Action("W", micro_batch, stage) in self.everything

    def source(self, action: Action) -> Action | None:
        """The action of the stage before (for F) or after (for B) whose result this one receives;
        None for what receives nothing."""
        step = {"F": -1, "B": 1, "W": 0}[action.kind]
        if step == 0 or not 0 <= action.stage + step < self.stages:
            return None
        return Action(action.kind, action.micro_batch, action.stage + step)

    def own_earlier(self, action: Action) -> Action | None:
        """The action of the same stage that must come first: F for a B, B for a W."""
        kind = {"F": None, "B": "F", "W": "B"}[action.kind]
        return kind and Action(kind, action.micro_batch, action.stage)

    def name(self, action: Action) -> str:
        """The action as it is written in its rank's list: `F(2)`, `B(0, chunk=1)`."""
        return repr(ChunkAction(action.kind, action.micro_batch, action.stage // len(self.ranks)))

    def _to_cell(self, action):
        kind = "I" if action.kind == "B" and self.is_split(action.stage, action.micro_batch) \
            else action.kind
        return f"{action.stage}{kind}{action.micro_batch}"


def _actions(entries, rank, ranks) -> tuple[Action, ...]:
    """The actions of one rank's list."""
    if isinstance(entries, str | dict | ChunkAction | Action) or not isinstance(entries, Iterable):
        raise IllegalSchedule(f"rank {rank} has no list of actions, but {entries!r:.60}",
                              "wrong_type")
    found = []
    for index, entry in enumerate(entries):
        if index == MOST_ENTRIES:  # a generator need not end
            raise IllegalSchedule(f"rank {rank} has more than {MOST_ENTRIES:,} actions",
                                  "endless_list")
        if isinstance(entry, ChunkAction):
            found.append(Action(entry.kind, entry.micro_batch, entry.chunk * ranks + rank))
        elif isinstance(entry, Action):
            found.append(entry)
        elif isinstance(entry, str) and entry.strip():
            found.append(_cell(entry.strip(), rank)[1])
        elif entry is not None and entry != "":
            raise IllegalSchedule(f"rank {rank}, index {index} of its list: {entry!r:.60} is no "
                                  "action; write F(i), B(i) or W(i)", "wrong_type")
    return tuple(found)


def _cell(text, rank) -> tuple[str, Action]:
    """The cell and its action."""
    match = _CELL.fullmatch(text)
    if not match:
        raise IllegalSchedule(f"rank {rank}: {text!r:.60} is no action; a cell is a stage, F, B, I "
                              "or W, and a micro-batch, as 1F0")
    stage, kind, micro_batch = match.groups()
    return text, Action("B" if kind == "I" else kind, int(micro_batch), int(stage))


def _require_split(lists):
    """A text says of each backward whether it is whole, B, or the input's only, I; a W must fit."""
    weights = {(action.stage, action.micro_batch) for cells in lists for _, action in cells
               if action.kind == "W"}
    for rank, cells in enumerate(lists):
        for text, action in cells:
            has_weight = (action.stage, action.micro_batch) in weights
            if "I" in text and not has_weight:
                raise IllegalSchedule(f"rank {rank}: {text} is the gradient of the input only, but "
                                      f"{text.replace('I', 'W')} never follows")
            if "B" in text and has_weight:
                raise IllegalSchedule(f"rank {rank}: {text} is the whole backward, but "
                                      f"{text.replace('B', 'W')} is listed, too; write "
                                      f"{text.replace('B', 'I')}")
