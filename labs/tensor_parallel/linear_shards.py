"""Exercise 7.2: a linear layer cut by its outputs, and one cut by its inputs, between them one
product less for each rank and one all-reduce in forward."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.invariants import require_group
from labs.checks.on_ranks import close, largest_difference, on_ranks, raise_on_all_ranks
from labs.checks.tolerances import SUMS
from labs.checks.verdicts import Wrong, check, kind_of
from labs.meters.traffic import Traffic, numbers_sent
from labs.tensor_parallel.groups import groups_to_try, require_value_error
from labs.tensor_parallel.kept_memory import StorageRef, surplus_bytes
from labs.workers import devices

INPUTS, INNER, OUTPUTS = 24, 36, 20  # 2, 3 and 4 divide the inputs and the inner size
_ROWS = ("Rank r of t takes the r-th of t equal parts of the rows of linear.weight, which is "
         "[out, in], and of linear.bias.")
_COLUMNS = ("Rank r of t takes the r-th of t equal parts of the columns of linear.weight, which is "
            "[out, in]; the bias is replicated.")
_BIAS = "Add the bias after the sum over the ranks, once."


@check("7.2")
def check_linear_shards(column_shard: Callable, RowParallelLinear: Callable):
    """column_shard(linear, group): this rank's rows of a linear layer. RowParallelLinear(linear,
    group): a module with this rank's columns, whose output is not sharded."""
    on_ranks(_try_both, column_shard, RowParallelLinear)
    return ("a column-parallel and a row-parallel layer give the outputs and gradients of "
            "unsharded ones on 2, 3 and 4 ranks and on a group of 2 of them; each rank holds 1/t "
            "of the weights and sends one all-reduce in forward; uneven sizes are refused")


def _try_both(column_shard, row_parallel):
    for words, group in groups_to_try():
        for bias, dtype in ((True, torch.float32), (False, torch.float64)):
            _Trial(words, group, bias, dtype).judge(column_shard, row_parallel)
    group, ranks = dist.group.WORLD, dist.get_world_size()
    # One more than a multiple of the number of ranks, whatever that number is.
    odd = 12 * ranks + 1
    for name, make, linear in (("column_shard", column_shard, nn.Linear(8, odd)),
                               ("RowParallelLinear", row_parallel, nn.Linear(odd, 8))):
        require_value_error(lambda make=make, linear=linear: make(linear, group),
                            f"{name} of {linear}", (odd, ranks))


class _SumInBackward(torch.autograd.Function):
    """f of the check's own, so that a mistake in the student's does not show here again."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        # A copy, because all_reduce writes into its tensor and another node may read this gradient;
        # contiguous, because NCCL refuses strides.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Trial:
    """Two unsharded layers beside their shards, with and without biases, in one dtype."""

    def __init__(self, words, group, bias, dtype):
        self.group, self.ranks = group, dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.where = f"{words}, {'with' if bias else 'without'} bias: rank {dist.get_rank()}"
        # The same on all ranks: they share the whole layers, the input and the gradient of the
        # output.
        torch.manual_seed(3)
        self.first = nn.Linear(INPUTS, INNER, bias, devices.device(), dtype)  # weight (36, 24)
        self.second = nn.Linear(INNER, OUTPUTS, bias, devices.device(), dtype)  # weight (20, 36)
        self.x = torch.randn(2, 5, INPUTS, device=devices.device(), dtype=dtype)
        self.upstream = torch.randn(2, 5, OUTPUTS, device=devices.device(), dtype=dtype)

    def judge(self, column_shard, row_parallel) -> None:
        column = self._made("column_shard", column_shard, self.first, (0, 0), _ROWS)
        row = self._made("RowParallelLinear", row_parallel, self.second, (1, None), _COLUMNS)
        x, whole_x = (self.x.clone().requires_grad_() for _ in range(2))
        with Traffic() as of_column:
            inner = column(_SumInBackward.apply(x, self.group))  # (2, 5, 36/t)
        raise_on_all_ranks(self._judge_inner, inner, of_column)
        with Traffic() as of_row, of_row.marked_waits():
            y = row(torch.tanh(inner))  # (2, 5, 20)
            forgotten = of_row.never_waited_for()
        # tanh acts on each element, so each rank applies it to its own part of the inner values.
        want = self.second(torch.tanh(self.first(whole_x)))
        raise_on_all_ranks(self._judge_output, y, want.detach(), of_row, forgotten)
        with Traffic() as backward:
            (y * self.upstream).sum().backward()
        (want * self.upstream).sum().backward()
        raise_on_all_ranks(self._judge_gradients, column, row, x.grad, whole_x.grad)
        raise_on_all_ranks(self._judge_backward_traffic, backward)

    def _made(self, name, make, whole, dimensions, hint):
        """What the student makes of a copy of the layer, of which nothing may be left but a bias.
        dimensions: along which weight and bias are divided."""
        given = copy.deepcopy(whole)
        original = StorageRef(given.weight)
        made = make(given, self.group)
        # The check's own reference to the layer must not be what keeps the weight.
        del given
        raise_on_all_ranks(self._judge_made, name, made, whole, dimensions, hint)
        raise_on_all_ranks(self._judge_kept, name, made, whole, dimensions, original)
        return made

    def _judge_made(self, name, made, whole, dimensions, hint):
        if not isinstance(made, nn.Module):
            raise Wrong(f"{self.where}: {name} returned {kind_of(made)}, not a module",
                        "Return an nn.Linear with this rank's rows." * (name == "column_shard"),
                        code="wrong_type")
        for kind, dimension in zip(("weight", "bias"), dimensions, strict=True):
            if (tensor := getattr(whole, kind)) is not None:
                self._judge_parameter(name, made, kind, tensor, dimension, hint)

    def _judge_kept(self, name, made, whole, dimensions, original):
        # The shard is right, but the layer lives on in a list, a closure or an attribute.
        if original.is_alive():
            raise Wrong(f"{self.where}: after {name} the full weight is still in memory, "
                        f"{original.bytes:,} bytes",
                        "Keep neither the layer nor its weight: copy this rank's part out of it.",
                        code="memory_kept")
        # Catches a copy of the full weight next to the shard.
        parts = [self._part(tensor, dimension) for tensor, dimension in
                 zip((whole.weight, whole.bias), dimensions, strict=True) if tensor is not None]
        needed = sum(part.numel() * part.element_size() for part in parts)
        if surplus := surplus_bytes(made, needed):
            raise Wrong(f"{self.where}: what {name} returned holds {needed + surplus:,} bytes of "
                        f"memory; this rank's part has {needed:,}",
                        "Keep this rank's part, and no other tensor.", code="memory_kept")

    def _judge_parameter(self, name, module, kind, whole, dimension, hint):
        found = _parameter(module, kind)
        want = self._part(whole.detach(), dimension)
        who = f"{self.where}: {kind} of {name}"
        if found is None:
            raise Wrong(f"{who}: the module has no such parameter", "An nn.Parameter, so that the "
                        "optimizer finds it.", code="missing_parameter")
        if found.shape != want.shape:
            raise Wrong(f"{who}: its shape is {list(found.shape)}, not {list(want.shape)}, for a "
                        f"full one of {list(whole.shape)}", hint, code="wrong_shape")
        if found.dtype != whole.dtype or not found.requires_grad:
            raise Wrong(f"{who}: it is {found.dtype}, requires_grad={found.requires_grad}; the "
                        f"layer's is {whole.dtype}, and is trained", "Keep dtype and device.",
                        code="wrong_dtype")
        # A part of the right shape may be another rank's, or its rows dealt out in turn.
        if not torch.equal(found.detach(), want):
            raise Wrong(f"{who}: its numbers are not those of part {self.rank} of {self.ranks}",
                        hint, code="wrong_part")
        # A view keeps the memory of the full weight.
        if (held := found.untyped_storage().nbytes()) > want.numel() * want.element_size():
            raise Wrong(f"{who}: it holds {held:,} bytes of memory for "
                        f"{want.numel() * want.element_size():,} of its own",
                        "A slice is a view of the full tensor: clone it.", code="memory_kept")

    def _part(self, whole, dimension):
        return whole if dimension is None else whole.chunk(self.ranks, dimension)[self.rank]

    def _judge_inner(self, inner, traffic):
        # The invariant: rank r computes the r-th part of the outputs from the whole input, without
        # a collective. Catches a gather of the outputs at the end of column_shard.
        want = self._part(self.first(self.x).detach(), -1)
        self._require_tensor(inner, "column_shard")
        if largest_difference(inner.detach(), want) > SUMS:
            said, code = f"has the shape {list(inner.shape)}, not {list(want.shape)}", "wrong_shape"
            if inner.shape == want.shape:
                off = largest_difference(inner.detach(), want)
                said, code = f"is off by up to {off:.2g} from those columns", "wrong_output"
            raise Wrong(f"{self.where}: the output of column_shard should be part {self.rank} of "
                        f"the unsharded layer's, of {self.ranks}; it {said}", _ROWS, code=code)
        if traffic.bytes:
            raise Wrong(f"{self.where}: column_shard sends {traffic.bytes:,} bytes in forward; it "
                        "need send none", "Each rank computes its own columns of the output.",
                        code="extra_collective")

    def _require_tensor(self, output, name):
        if not isinstance(output, torch.Tensor):
            raise Wrong(f"{self.where}: the forward of {name}'s layer returned {kind_of(output)}, "
                        "not a tensor", "As nn.Linear does, it returns one tensor.",
                        code="wrong_type")

    def _judge_output(self, y, want, traffic, forgotten):
        who = f"{self.where}: RowParallelLinear"
        self._require_tensor(y, "RowParallelLinear")
        if forgotten:
            raise Wrong(f"{who} does not wait for its {forgotten[0].kind}", "Call .wait().",
                        code="never_waited")
        # The invariant: W x + b = Σ over ranks of W_r x_r, plus b once. A layer that keeps the bias
        # in each rank's nn.Linear adds it before the sum, t times.
        bias = self.second.bias
        if largest_difference(y.detach(), want) > SUMS:
            surplus = 0.0 if bias is None else (self.ranks - 1) * bias.detach()
            code, hint = "wrong_output", _COLUMNS
            cause = f"off by up to {largest_difference(y.detach(), want):.2g}"
            if y.shape == want.shape and bias is not None and close(y.detach() - surplus, want):
                code, hint = "bias_on_every_rank", _BIAS
                cause = f"the bias is in it {self.ranks} times"
            elif y.shape == want.shape and not traffic.calls:
                cause = "it is this rank's part alone: nothing was summed over the ranks"
                code, hint = "not_summed", "ReduceFromRegion sums it."
            raise Wrong(f"{who}: its output is not the unsharded layer's; {cause}", hint, code=code)
        require_group(traffic, self.group, who)
        sent = numbers_sent(traffic.calls)
        # A ring of sends moves 2(N-1)/N of what it reduces.
        if sent > 2 * want.numel():
            raise Wrong(f"{who} sends {sent:,.0f} elements in forward, in "
                        f"{', '.join(call.kind for call in traffic.calls)}; one all-reduce of its "
                        f"output has {want.numel():,}",
                        "Sum the outputs; weights and inputs stay where they are.",
                        code="wrong_traffic")

    def _judge_gradients(self, column, row, got_x, want_x):
        # The invariant: every gradient of a shard is that part of the whole layer's gradient, and
        # the gradient of the bias is complete on every rank, without any reduction.
        for name, module, whole, dimensions in (
                ("column_shard", column, self.first, {"weight": 0, "bias": 0}),
                ("RowParallelLinear", row, self.second, {"weight": 1, "bias": None})):
            for kind, dimension in dimensions.items():
                if getattr(whole, kind) is not None:
                    self._judge_gradient(f"{self.where}: gradient of the {kind} of {name}",
                                         _parameter(module, kind).grad,
                                         self._part(getattr(whole, kind).grad, dimension))
        self._judge_gradient(f"{self.where}: gradient of the input of both layers", got_x, want_x,
                             "Who uses the two layers applies f once, before them: f is in neither "
                             "of them.")

    def _judge_gradient(self, who, got, want, hint="g's backward is the identity: all that comes "
                        "before it is this rank's own."):
        if got is None:
            raise Wrong(f"{who}: there is none", "A bias that one rank adds alone trains on that "
                        "rank alone: add it on every rank, after the sum.", code="gradient_missing")
        if close(got, want):
            return
        causes = (("wrong_scale", f"it is {self.ranks} times what it should be",
                   want * self.ranks),
                  ("wrong_scale", f"it is 1/{self.ranks} of what it should be", want / self.ranks),
                  ("zero_gradient", "it is zero", torch.zeros_like(want)))
        code, cause = next(((code, words) for code, words, value in causes if close(got, value)),
                           ("wrong_gradient", f"off by up to {largest_difference(got, want):.2g}"))
        raise Wrong(f"{who} is not the unsharded layer's: {cause}", hint, code=code)

    def _judge_backward_traffic(self, traffic):
        # The check's own f, once, is all that backward sends.
        sent = numbers_sent(traffic.calls)
        if sent > self.x.numel():
            raise Wrong(f"{self.where}: the two layers send {sent - self.x.numel():,.0f} elements "
                        "in backward; they need send none",
                        "g's backward is the identity, and every gradient of a shard is complete.",
                        code="extra_collective")


def _parameter(module, kind) -> nn.Parameter | None:
    """The module's weight or bias, or that of a layer in it."""
    found = {name: p for name, p in module.named_parameters() if name.split(".")[-1] == kind}
    return found.get(kind) if kind in found else next(iter(found.values()), None)
