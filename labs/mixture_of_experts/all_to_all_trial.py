"""What exercise 9.3 holds AllToAll to: rows sent to other ranks in forward, and their gradients the
same way back in backward, with uneven splits, on any group."""

from itertools import pairwise

import torch
import torch.distributed as dist

from labs.checks.invariants import require_group
from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.verdicts import Wrong, kind_of
from labs.meters.traffic import Traffic, numbers_sent
from labs.workers import devices

_HINT = ("Forward: send[i] rows to rank i, receive[i] rows from it. Backward: the gradients of the "
         "rows that came from rank i, back to it.")


def equal_totals(ranks: int) -> list[list[int]]:
    """[i][j]: rows that rank i sends to rank j. Each rank sends as many rows as it receives, so
    that no shape shows a mistake; but above 2 ranks other numbers to each than it gets from it."""
    return [[1 + (to - rank) % ranks for to in range(ranks)] for rank in range(ranks)]


def some_nothing(ranks: int) -> list[list[int]]:
    """[i][j]: rows that rank i sends to rank j. The first rank sends none, the last one gets none,
    and no rank sends as many as it gets."""
    return [[rank * (to + 1) * (to < ranks - 1) for to in range(ranks)] for rank in range(ranks)]


class AllToAllTrial:
    """One call, and backward through it, on rows of one shape. Numbers are whole, and each stands
    for one element of one rank, so results are equal or wrong.

    other: a group on which another call comes between forward and backward. row: the shape of a
    row; strided: rows and gradients are not contiguous.
    """

    def __init__(self, words, group, other, matrix, row=(3,), dtype=torch.float32, strided=False):
        self.who = f"AllToAll on {words}, rank {dist.get_rank()}"
        self.group, self.other, self.strided = group, other, strided
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.row, self.dtype = row, dtype
        self.matrix = matrix(self.ranks)
        self.receive, self.send = self._column(self.rank), self.matrix[self.rank]

    def _column(self, rank) -> list[int]:
        return [row[rank] for row in self.matrix]

    def _numbered(self, rows: int, rank: int, offset: int) -> torch.Tensor:
        """So many rows of rank `rank`, on this rank's device."""
        size = rows * torch.Size(self.row).numel()
        values = torch.arange(size, dtype=self.dtype) + 10_000 * (rank + 1) + offset
        values = values.view(rows, *self.row)
        if self.strided:  # the same numbers, the rows in another memory order
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        return values.to(devices.device())

    def _rows(self, rank) -> torch.Tensor:
        return self._numbered(sum(self.matrix[rank]), rank, 0)

    def _upstream(self, rank) -> torch.Tensor:
        return self._numbered(sum(self._column(rank)), rank, 500_000)

    def _arrived(self, of, splits) -> torch.Tensor:
        """What this rank has after each rank i has sent of(i), split by splits(i)."""
        parts = []
        for rank in range(self.ranks):
            ends = [0, *torch.tensor(splits(rank)).cumsum(0).tolist()]
            start, end = list(pairwise(ends))[self.rank]
            parts.append(of(rank)[start:end])
        return torch.cat(parts)

    def judge(self, function) -> None:
        """Calls function.apply, and backward through it; raises Wrong on all ranks."""
        rows = self._rows(self.rank).requires_grad_()
        given = rows.detach().clone()
        with Traffic() as forward, forward.marked_waits():
            y = function.apply(rows, self.receive, self.send, self.group)
            _read(y)
            forgotten = forward.never_waited_for()
        raise_on_all_ranks(self._judge_forward, y, rows, given, forward, forgotten)
        # A layer more, with other splits on another group: catches what is kept on the class.
        count = dist.get_world_size(self.other)
        function.apply(torch.ones(count, 2, device=devices.device(), requires_grad=True),
                       [1] * count, [1] * count, self.other)
        with Traffic() as backward, backward.marked_waits():
            y.backward(self._upstream(self.rank))
            _read(rows.grad)
            forgotten = backward.never_waited_for()
        raise_on_all_ranks(self._judge_backward, rows.grad, backward, forgotten)

    def _judge_forward(self, y, rows, given, traffic, forgotten):
        self._judge_waits(forgotten, "forward")
        if not torch.equal(rows.detach(), given):
            raise Wrong(f"{self.who}: forward changed the rows that it was given",
                        "What arrives is a new tensor: rows.new_empty(sum(receive), ...).",
                        code="rows_overwritten")
        mine = self.matrix.__getitem__
        self._compare(y, self._arrived(self._rows, mine), "forward returned", [
            ("not_sent", "this rank's own rows: nothing was sent", rows.detach()),
            ("splits_swapped", "the rows of swapped splits: `receive` belongs to the output, "
             "`send` to the input", self._arrived(self._rows, self._column))])
        if not y.requires_grad:
            raise Wrong(f"{self.who}: the output has no gradient", "Compute inside forward, and "
                        "return the tensor that arrived.", code="no_gradient_function")
        self._judge_traffic(traffic, "forward", rows)

    def _judge_backward(self, gradient, traffic, forgotten):
        self._judge_waits(forgotten, "backward")
        if gradient is None:
            raise Wrong(f"{self.who}: backward returned no gradient for the rows", _HINT,
                        code="gradient_missing")
        mine, upstream = self.matrix.__getitem__, self._upstream(self.rank)
        # The invariant: a row's gradient is that of its copy on the rank to which it was sent. So
        # each rank returns what it got from rank i to rank i: the two splits change roles.
        self._compare(gradient, self._arrived(self._upstream, self._column), "backward returned", [
            ("gradient_not_sent", "the gradients of the rows that this rank received, which belong "
             "to other ranks", upstream),
            ("splits_not_swapped", "gradients that were sent by the splits of forward: in backward "
             "the two change roles", self._arrived(self._upstream, mine)
             if sum(self.send) == sum(self.receive) else None)])
        self._judge_traffic(traffic, "backward", upstream)

    def _compare(self, got, want, what, causes):
        if not isinstance(got, torch.Tensor):
            raise Wrong(f"{self.who}: {what} {kind_of(got)}, not a tensor", _HINT,
                        code="wrong_type")
        got = got.detach()
        if got.dtype == want.dtype and torch.equal(got, want):
            return
        causes = [*causes, ("zeros", "zeros", torch.zeros_like(want)),
                  ("wrong_scale", f"{self.ranks} times what it should be", want * self.ranks),
                  ("wrong_scale", f"1/{self.ranks} of what it should be", want / self.ranks)]
        code, words = next(((code, words) for code, words, value in causes
                            if value is not None and value.dtype == got.dtype
                            and torch.equal(got, value)), ("wrong_rows", "other rows"))
        if got.shape != want.shape and code == "wrong_rows":
            code, words = "wrong_shape", (f"{kind_of(got)}, not one of shape {list(want.shape)}")
        elif got.dtype != want.dtype:
            code, words = "wrong_dtype", f"{got.dtype}, not {want.dtype}"
        raise Wrong(f"{self.who}: {what} {words}", _HINT, code=code)

    def _judge_waits(self, forgotten, direction):
        if forgotten:
            raise Wrong(f"{self.who}: {direction} does not wait for its {forgotten[0].kind}",
                        "With async_op=True a collective returns before it is done: call .wait().",
                        code="never_waited")

    def _judge_traffic(self, traffic, direction, rows):
        require_group(traffic, self.group, f"{self.who}, {direction}")
        # Catches a gather of everybody's rows, and rows that are padded to equal parts.
        if (sent := numbers_sent(traffic.calls)) > rows.numel():
            raise Wrong(f"{self.who}: {direction} communicates {sent:,.0f} elements in "
                        f"{', '.join(call.kind for call in traffic.calls)}; the rows have "
                        f"{rows.numel():,}", "One all-to-all: each row goes to one rank.",
                        code="wrong_traffic")


def _read(tensor) -> None:
    """Reads a tensor, as a user of it does: a functional collective waits only then."""
    if isinstance(tensor, torch.Tensor):
        tensor.detach().add(0)
