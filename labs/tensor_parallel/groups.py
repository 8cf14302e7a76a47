"""Process groups on which the checks of notebook 07a try an answer: all ranks, and two groups of
every second rank, so that a collective on all ranks shows; and sizes that a number of ranks does
not divide, for which the answer must raise a ValueError that helps."""

import re
from collections.abc import Callable, Iterator

import torch.distributed as dist

from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.verdicts import Wrong


def groups_to_try() -> Iterator[tuple[str, dist.ProcessGroup]]:
    """On a rank: (in words, group): all ranks; on 4 ranks also this rank's of the groups of ranks 0
    and 2, and of ranks 1 and 3."""
    ranks = dist.get_world_size()
    yield f"{ranks} ranks", dist.group.WORLD
    if ranks == 4:
        yield "a group of 2 of 4 ranks", every_second_rank()


def every_second_rank() -> dist.ProcessGroup:
    """On a rank: the group of the ranks whose numbers are even, or odd, as this rank's is."""
    # new_group is a collective over all ranks: each makes both groups, in the same order, and uses
    # one. Neighbours would not do: with ranks 0 and 1 the first group's numbers are those of the
    # world.
    halves = [dist.new_group(list(range(half, dist.get_world_size(), 2))) for half in (0, 1)]
    return halves[dist.get_rank() % 2]


def named_rank(group: dist.ProcessGroup) -> str:
    """This rank as a message names it, with its number in the group where that is another one."""
    rank, own = dist.get_rank(), dist.get_rank(group)
    return f"rank {rank}" + f" ({own} of its group)" * (rank != own)


_TO_DO = (r"\b(use|choose|take|train|run|launch|set|change|give|pick|try|replicate|reduce|need\w*|"
          r"must|should|make|keep|pad|want|require\w*|multiple|either|instead|only|please|divisor)\b")


def require_value_error(call: Callable, what: str, numbers: tuple[int, int],
                        module: str = "", other: str = "") -> None:
    """On a rank: raises Wrong on all ranks unless call() raises a ValueError, on every rank, whose
    one sentence has both numbers and what to do. module: a regular expression of which a match
    names the module, where the sentence must; other: of which a match names a module that
    divides."""
    error = None
    try:
        call()
    except Exception as raised:  # of another kind: that is what is judged
        error = raised
    raise_on_all_ranks(_judge, error, what, numbers, module, other)


def _judge(error, what, numbers, module, other):
    rank, (size, ranks) = dist.get_rank(), numbers
    who = f"rank {rank}: {what} on {ranks} ranks"
    example = f"for example: '...: {ranks} ranks do not divide {size}; use 2 ranks'"
    # An exercise that is not filled in yet, or a verdict of a check inside: not the student's
    # error.
    if isinstance(error, NotImplementedError | Wrong):
        raise error
    # Without it rows of two ranks overlap or are left out, or a head is cut in two, and training
    # goes on with wrong numbers.
    if error is None:
        raise Wrong(f"{who}: no error, though {ranks} does not divide {size}",
                    f"raise ValueError with one sentence, {example}", code="no_error")
    if not isinstance(error, ValueError):
        said = str(error).split("\n")[0][:80]
        raise Wrong(f"{who}: {type(error).__name__} ({said}), not ValueError",
                    f"Compare the sizes first, and raise ValueError with one sentence, {example}",
                    code="wrong_error")
    said = str(error)
    # The invariant: the message has the size and the number of ranks, so that who reads it in a log
    # knows what to change.
    missing = [str(number) for number in numbers if not re.search(rf"\b{number}\b", said)]
    if missing:
        raise Wrong(f"{who}: the ValueError does not say {' and '.join(missing)}: {said[:120]!r}",
                    f"One sentence, {example}", code="sizes_not_named")
    if module and not re.search(module, said):
        raise Wrong(f"{who}: the ValueError does not name the module: {said[:120]!r}",
                    "Say where it is: self_attn, or mlp.", code="module_not_named")
    # A sentence that names every module fits all cases, and helps in none.
    if other and re.search(other, said):
        raise Wrong(f"{who}: the ValueError also names a module that {ranks} divides: "
                    f"{said[:120]!r}", "Name the one that does not divide: self_attn, or mlp.",
                    code="wrong_module_named")
    if "\n" in said.strip() or not re.search(_TO_DO, said, re.IGNORECASE):
        raise Wrong(f"{who}: the ValueError does not say in one sentence what to do: "
                    f"{said[:120]!r}", example.capitalize(), code="way_out_not_named")
