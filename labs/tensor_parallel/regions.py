"""Exercise 7.1: f and g, the two ends of a region in which each rank has a part of the work."""


import torch
import torch.distributed as dist

from labs.checks.invariants import require_group
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check, kind_of
from labs.meters.traffic import Traffic, numbers_sent
from labs.tensor_parallel.groups import groups_to_try
from labs.workers import devices

HINTS = {
    "Tensors must be contiguous": "Collectives take contiguous tensors: "
    "clone(memory_format=torch.contiguous_format) makes one.",
    "is at version": "all_reduce writes into its tensor. Clone it first.",
    "has been used in an in-place operation": "all_reduce writes into its tensor. Clone it first.",
    "returned an incorrect number of gradients": "backward returns a gradient for each argument of "
    "forward: one for x, and None for the group."}
_IN_PLACE = "dist.all_reduce writes into its tensor: clone it first, and reduce the clone."
_ROLES = {"CopyToRegion": "f copies in forward and sums in backward",
          "ReduceFromRegion": "g sums in forward and copies in backward"}


@check("7.1", hints=HINTS)
def check_regions(CopyToRegion, ReduceFromRegion):
    """CopyToRegion.apply(x, group) and ReduceFromRegion.apply(x, group): identity in one direction,
    the sum over the group's ranks in the other."""
    on_ranks(_try_both, CopyToRegion, ReduceFromRegion)
    return ("f copies in forward and sums the gradients in backward, g sums in forward and copies "
            "in backward, on 2, 3 and 4 ranks and on a group of 2 of them; each sends one "
            "all-reduce, and no tensor of the caller is written to")


def _try_both(copy_to, reduce_from):
    for name, function in (("CopyToRegion", copy_to), ("ReduceFromRegion", reduce_from)):
        if not callable(getattr(function, "apply", None)):
            raise Wrong(f"{name} is {kind_of(function)}, which has no `apply`",
                        f"class {name}(torch.autograd.Function): ...", code="wrong_type")
    tried = list(groups_to_try())
    # Each group with the one at the mirrored place of the list: on 4 ranks another group, on 2 and
    # 3 ranks the same.
    for (words, group), (_, other) in zip(tried, reversed(tried), strict=True):
        for dtype, transposed in ((torch.float32, False), (torch.float64, True)):
            for name, function, sums_forward in (("CopyToRegion", copy_to, False),
                                                 ("ReduceFromRegion", reduce_from, True)):
                _Trial(f"{name} on {words}, rank {dist.get_rank()}", name, group, other,
                       dtype, transposed).judge(function, sums_forward)


class _Trial:
    """One function on one kind of tensor. Numbers are whole, so that sums are exact, and have as
    many digits as the dtype, so that a sum in a smaller one shows.

    y = function(x) is added to 2 · `beside`, and autograd gives both the same gradient tensor, to
    the function's backward first, because it was called later.
    """

    def __init__(self, who, name, group, other, dtype, transposed):
        self.who, self.name, self.group, self.other = who, name, group, other
        # float32 has 24 bits for a whole number, float64 53. The sum over 4 ranks adds 2 bits, so
        # it is exact; a sum in bfloat16 (8 bits) or of float64 in float32 is not.
        self.most = 2 ** {torch.float32: 20, torch.float64: 45}[dtype]
        # Other numbers on each rank: of equal ones the mean over ranks would be the input itself.
        generator = torch.Generator().manual_seed(7 + dist.get_rank())

        def draw():
            drawn = torch.randint(-self.most, self.most, (4, 6), generator=generator).to(dtype)
            # Transposed: not contiguous, as hidden states can be. NCCL refuses such a tensor.
            return (drawn.t() if transposed else drawn).to(devices.device())

        self.x, self.beside, self.upstream = draw(), draw(), draw()  # (4, 6) or (6, 4)
        self.total, self.total_upstream = self._sum(self.x), self._sum(self.upstream)
        self.elsewhere = [self._sum(each, other) for each in (self.x, self.upstream)]
        # `_version` (private) counts in-place writes: a write that is undone again shows, too.
        self.kept, self.version = self.x.clone(), self.x._version

    def _sum(self, tensor, group=None):
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group or self.group)
        return total

    def judge(self, function, sums_forward: bool) -> None:
        """Calls function.apply, and backward through it; raises Wrong on all ranks."""
        self.x.requires_grad_()
        # Before function.apply: backward runs the later node first, so that what the function's
        # backward writes into the shared gradient reaches `beside`.
        doubled = 2 * self.beside.requires_grad_()
        with Traffic() as forward, forward.marked_waits():
            y = function.apply(self.x, self.group)
            read_tensor(y)
            forgotten = forward.never_waited_for()
        raise_on_all_ranks(self._judge_waits, forgotten, "forward")
        raise_on_all_ranks(self._judge_forward, y, sums_forward)
        raise_on_all_ranks(self._judge_traffic, forward, "forward", sums_forward)
        # Another call on another group comes between forward and backward, as in a model whose
        # layers are divided among different groups.
        function.apply(self.x.detach().clone().requires_grad_(), self.other)
        with Traffic() as backward, backward.marked_waits():
            ((y + doubled) * self.upstream).sum().backward()
            read_tensor(self.x.grad)
            forgotten = backward.never_waited_for()
        raise_on_all_ranks(self._judge_waits, forgotten, "backward")
        raise_on_all_ranks(self._judge_backward, sums_forward)
        raise_on_all_ranks(self._judge_traffic, backward, "backward", not sums_forward)

    def _judge_forward(self, y, sums):
        if not isinstance(y, torch.Tensor):
            raise Wrong(f"{self.who}: forward returned {kind_of(y)}, not a tensor", self._hint,
                        code="wrong_type")
        # An all-reduce of the caller's own tensor gives the right sum, and x is another one then.
        if not torch.equal(self.x, self.kept) or self.x._version != self.version:
            raise Wrong(f"{self.who}: forward changed its input", _IN_PLACE, code="changes_input")
        self._compare(y.detach(), self.total if sums else self.x.detach(), "forward returned",
                      [("not_summed", "its input, not the sum over the ranks", self.x.detach()),
                       ("summed_too_often", "the sum over the ranks, not its input", self.total)])
        if not y.requires_grad:
            raise Wrong(f"{self.who}: the output has no gradient",
                        "Compute inside forward, and return the result from it; autograd calls "
                        "backward for it.", code="no_gradient_function")

    def _judge_backward(self, sums_forward):
        # The invariant: the two directions are each other's transpose. Where forward copies, every
        # rank's use of x adds to its gradient, so backward sums; where forward sums, each rank's x
        # enters the total once, so backward copies.
        want = self.upstream if sums_forward else self.total_upstream
        if self.x.grad is None:
            raise Wrong(f"{self.who}: backward returned no gradient for x", self._hint,
                        code="gradient_missing")
        self._compare(self.x.grad, want, "backward returned",
                      [("not_summed", "this rank's gradient alone, not the sum over the ranks",
                        self.upstream),
                       ("summed_too_often", "the sum over the ranks. Each rank has the whole "
                        "gradient already, so the sum counts it once for each rank",
                        self.total_upstream)])
        # Autograd gives this tensor to both inputs of a sum, so a residual connection would get
        # the wrong gradient.
        if not torch.equal(self.beside.grad, 2 * self.upstream):
            raise Wrong(f"{self.who}: backward wrote into the gradient that it was given, which "
                        "another layer reads, too", _IN_PLACE, code="changes_input")

    def _compare(self, got, want, what, causes):
        ranks = dist.get_world_size(self.group)
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Wrong(f"{self.who}: {what} {kind_of(got)} of {got.dtype}, not one of shape "
                        f"{list(want.shape)} and {want.dtype}", self._hint, code="wrong_type")
        if torch.equal(got, want):
            return
        causes = [*causes, ("zeros", "zeros", torch.zeros_like(want)),
                  ("averaged", "the mean over the ranks, not the sum", want / ranks),
                  *(("wrong_group", "the sum over the ranks of another group", each)
                    for each in self.elsewhere)]
        code, words = next(((code, words) for code, words, value in causes
                            if torch.equal(got, value)),
                           ("wrong_value", "something else than it should"))
        # bfloat16 rounds to 8 bits, an error of 0.4 %.
        if code == "wrong_value" and torch.allclose(got, want, rtol=0.01, atol=0.01 * self.most):
            code = "fewer_digits"
            words = f"the right numbers with fewer digits than {want.dtype} has"
        raise Wrong(f"{self.who}: {what} {words}", self._hint, code=code)

    @property
    def _hint(self):
        return _ROLES[self.name] + "."

    def _judge_waits(self, forgotten, direction):
        # What is not waited for may be done in time, or not.
        if forgotten:
            raise Wrong(f"{self.who}: {direction} does not wait for its {forgotten[0].kind}",
                        "With async_op=True a collective returns before it is done: call .wait().",
                        code="never_waited")

    def _judge_traffic(self, traffic, direction, sums):
        sent = numbers_sent(traffic.calls)
        # The invariant: identity is local. Catches a broadcast, or a sum in both directions.
        if not sums and sent:
            raise Wrong(f"{self.who}: {direction} sends {sent:.0f} elements, and it need send none",
                        self._hint, code="extra_collective")
        require_group(traffic, self.group, f"{self.who}, {direction}")
        # Catches an all-gather of all ranks' tensors that are summed here.
        if sent > 2 * self.x.numel():
            raise Wrong(f"{self.who}: {direction} moves {sent:.0f} elements for a tensor of "
                        f"{self.x.numel()}", "One dist.all_reduce sums it.", code="wrong_traffic")


def read_tensor(tensor) -> None:
    """Reads a tensor, as a user of it does: a functional collective waits only then."""
    if isinstance(tensor, torch.Tensor):
        tensor.detach().add(0)
