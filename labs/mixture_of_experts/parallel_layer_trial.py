"""What exercise 9.3 holds a layer to whose experts are split among the ranks of a group: outputs,
gradients, memory and traffic, beside the complete layer."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.invariants import require_group
from labs.checks.on_ranks import close, largest_difference, raise_on_all_ranks
from labs.checks.verdicts import Wrong, kind_of
from labs.meters.traffic import Traffic, numbers_sent
from labs.tensor_parallel.kept_memory import StorageRef, surplus_bytes
from labs.training.mixtures import ExpertLayer
from labs.words import counted
from labs.workers import devices

EXPERTS, HIDDEN, FFN = 12, 6, 5  # 2, 3 and 4 divide the experts
_PART = ("Rank r of the group's N takes the r-th of N equal parts of gate_up and of down, along "
         "dimension 0, the experts.")


@dataclass(frozen=True)
class Case:
    """words: what is special about it. to_last: every token chooses experts of the last rank, so
    that all others receive nothing. empty: the first rank has no tokens."""

    words: str
    k: int = 2
    shared: bool = False
    dtype: torch.dtype = torch.float32
    to_last: bool = False
    empty: bool = False


CASES = (Case("k = 2, a shared expert", shared=True),
         Case("all tokens choose experts of the last rank", dtype=torch.float64, to_last=True),
         Case("k = 1, no tokens on the first rank", k=1, empty=True),
         Case("k = all experts", k=EXPERTS))


class ParallelLayerTrial:
    """The student's layer beside the complete one, on this rank's own tokens."""

    def __init__(self, words, group, case: Case):
        self.case = case
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.who = f"{words}, {case.words}: rank {dist.get_rank()}"
        torch.manual_seed(5)  # the same layer on all ranks
        self.layer = ExpertLayer(EXPERTS, HIDDEN, FFN, case.k, case.shared)
        if case.to_last:
            # Each token's first number is 1, so this is a bias of the last rank's experts.
            self.layer.router.weight.data[-(EXPERTS // self.ranks):, 0] = 20
        torch.manual_seed(100 + dist.get_rank())  # other tokens on each rank, and other numbers
        batch = 0 if case.empty and not self.rank else 2
        sequence = 5 + dist.get_rank()
        self.x, self.upstream = (torch.randn(batch, sequence, HIDDEN) for _ in range(2))
        if case.to_last:
            self.x[..., 0] = 1
        self.layer, self.x, self.upstream = (
            each.to(devices.device(), case.dtype)
            for each in (self.layer, self.x, self.upstream))

    def judge(self, make: Callable) -> None:
        module = self._made(make)
        x, whole_x = (self.x.clone().requires_grad_() for _ in range(2))
        with Traffic() as forward:
            y = module(x)
        want = self.layer(whole_x)
        try:
            raise_on_all_ranks(self._judge_output, y, want.detach())
        except Wrong as wrong:  # on all ranks alike, so that they can go on communicating
            raise self._explained(y) or wrong from None
        with Traffic() as backward:
            (y * self.upstream).sum().backward()
        (want * self.upstream).sum().backward()
        # Before the check's own sums below, which are collectives, too: a rank that has left one
        # out is named first.
        sizes = self._sizes()
        for parameter in self.layer.experts.parameters():
            # Each rank's loss is of its own tokens: an expert gets the gradients of all of them.
            dist.all_reduce(parameter.grad, group=self.group)
        raise_on_all_ranks(self._judge_step, module, x.grad, whole_x.grad, forward, backward, sizes)

    def _judge_step(self, module, got_x, want_x, forward, backward, sizes):
        self._judge_gradients(module, got_x, want_x)
        self._judge_traffic(forward, "forward", EXPERTS + sizes, 3)
        self._judge_traffic(backward, "backward", sizes, 2)

    def _made(self, make) -> nn.Module:
        given = copy.deepcopy(self.layer)
        originals = [StorageRef(parameter) for parameter in given.experts.parameters()]
        made = make(given, self.group)
        del given  # the check's own reference must not be what keeps the experts
        raise_on_all_ranks(self._judge_made, made, originals)
        return made

    def _judge_made(self, made, originals):
        if not isinstance(made, nn.Module):
            raise Wrong(f"{self.who}: ExpertParallelLayer made {kind_of(made)}, not a module",
                        code="wrong_type")
        for name in ("gate_up", "down"):
            self._judge_part(made, name)
        if self.case != CASES[0]:  # a garbage collection takes longer than all else here
            return
        # Catches a list, a closure or an attribute that keeps the complete layer ...
        if any(original.is_alive() for original in originals):
            raise Wrong(f"{self.who}: the parameters of all {EXPERTS} experts are still in memory",
                        "Keep this rank's part, in memory of its own: .clone(). Keep neither the "
                        "layer nor its experts.", code="memory_kept")
        # ... and a copy of it.
        needed = sum(t.nbytes for name, t in self.layer.named_parameters()
                     if not name.startswith("experts."))
        needed += sum(self._part(t).nbytes for t in self.layer.experts.parameters())
        if surplus := surplus_bytes(made, needed):
            raise Wrong(f"{self.who}: the layer holds {needed + surplus:,} bytes; its part of the "
                        f"experts, the router and the shared expert have {needed:,}", _PART,
                        code="memory_kept")

    def _part(self, whole) -> torch.Tensor:
        return whole.detach().chunk(self.ranks)[self.rank]

    def _judge_part(self, made, name):
        found, want = _parameter(made, name), self._part(getattr(self.layer.experts, name))
        who = f"{self.who}: experts.{name}"
        if found is None:
            raise Wrong(f"{who}: the layer has no such parameter",
                        "self.experts = Experts(gate_up, down)", code="missing_parameter")
        if found.shape != want.shape:
            raise Wrong(f"{who}: its shape is {list(found.shape)}, not {list(want.shape)}", _PART,
                        code="wrong_shape")
        if found.dtype != want.dtype or not found.requires_grad:
            raise Wrong(f"{who}: it is {found.dtype}, requires_grad={found.requires_grad}; the "
                        f"layer's is {want.dtype}, and is trained", code="wrong_dtype")
        if not torch.equal(found.detach(), want):
            raise Wrong(f"{who}: its numbers are not those of part {self.rank} of {self.ranks}",
                        _PART, code="wrong_part")
        # A view keeps the memory of all experts.
        if (held := found.untyped_storage().nbytes()) > want.nbytes:
            raise Wrong(f"{who}: it holds {held:,} bytes of memory for {want.nbytes:,} of its own",
                        "A chunk is a view of the complete tensor: clone it.", code="memory_kept")

    def _judge_output(self, y, want):
        # The invariant: each token's output is that of the complete layer, wherever its experts
        # are.
        if not isinstance(y, torch.Tensor):
            raise Wrong(f"{self.who}: forward returned {kind_of(y)}, not a tensor",
                        code="wrong_type")
        if y.shape != want.shape:
            raise Wrong(f"{self.who}: the output has the shape {list(y.shape)}, not "
                        f"{list(want.shape)}", code="wrong_shape")
        if not want.numel() or close(y.detach(), want):
            return
        shared = self.layer.shared_experts
        if shared is not None and close(y.detach(), want - shared(self.x).detach()):
            raise Wrong(f"{self.who}: the output is that of the other experts alone: the shared "
                        "expert's is missing", "Keep self.shared_experts, which ExpertLayer's "
                        "forward adds.", code="shared_missing")
        raise Wrong(f"{self.who}: the output is not the complete layer's, off by up to "
                    f"{largest_difference(y.detach(), want):.2g}", "`compute` returns for each row "
                    "of `copies` its expert's output, in this order, and not weighted.",
                    code="wrong_output")

    def _explained(self, y) -> Wrong | None:
        """On all ranks: what the outputs of all of them are, where a known mistake leaves them."""
        for code, words, hint, put in _MISTAKES:
            with torch.no_grad():
                output = self._computed(put)
            same = isinstance(y, torch.Tensor) and y.shape == output.shape and (
                not y.numel() or close(y.detach(), output))
            by_rank = [None] * dist.get_world_size()
            dist.all_gather_object(by_rank, same)
            if all(by_rank):
                return Wrong(f"{self.who}: {words}", hint, code=code)
        return None

    def _computed(self, put: Callable) -> torch.Tensor:
        """The layer's output where put(arrived, order, experts) stands for what the right answer
        does with the rows that arrive."""
        layer, tokens = self.layer, self.x.flatten(0, -2)
        weights, chosen = layer.router(tokens).float().softmax(-1).topk(layer.k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS).view(self.ranks, -1)
        theirs = torch.empty_like(counts)  # (ranks, experts of this rank)
        dist.all_to_all_single(theirs, counts, group=self.group)
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = tokens.new_empty(sum(receive), HIDDEN)
        dist.all_to_all_single(arrived, tokens[order // layer.k], receive, send, group=self.group)
        experts = copy.copy(layer.experts)
        experts._parameters = {name: self._part(p) for name, p in layer.experts._parameters.items()}
        number = torch.arange(theirs.numel(), device=theirs.device) % theirs.shape[1]
        by_expert = number.repeat_interleave(theirs.flatten()).argsort(stable=True)
        outputs = put(arrived, by_expert, lambda rows: experts(rows, theirs.sum(0).tolist()))
        back = tokens.new_empty(len(order), HIDDEN)
        dist.all_to_all_single(back, outputs, send, receive, group=self.group)
        back = back[order.argsort()].view(len(tokens), layer.k, HIDDEN)
        result = (weights[..., None] * back).sum(1).view_as(self.x)
        return result if layer.shared_experts is None else result + layer.shared_experts(self.x)

    def _judge_gradients(self, module, got_x, want_x):
        own = "Rows that arrive carry their gradients back: use AllToAll for them, both times."
        self._judge_gradient("the input", got_x, want_x, own)
        parameters = dict(module.named_parameters())
        for name, parameter in self.layer.named_parameters():
            if name.startswith("experts."):
                # The invariant: an expert's gradient is the sum over the tokens of all ranks of the
                # group; also where no token came, then it is zero. It is not None: ranks that have
                # the same expert will all-reduce it.
                self._judge_gradient(name, _parameter(module, name.split(".")[1]).grad,
                                     parameter.grad.chunk(self.ranks)[self.rank], own)
            else:
                # Replicated: of this rank's own tokens. To average over ranks is exercise 9.4.
                found = parameters.get(name)
                self._judge_gradient(name, None if found is None else found.grad, parameter.grad,
                                     "Use layer.router and layer.shared_experts, on every rank.")

    def _judge_gradient(self, name, got, want, hint):
        who = f"{self.who}: gradient of {name}"
        if got is None:
            raise Wrong(f"{who}: there is none", hint, code="gradient_missing")
        if not want.numel() or close(got, want):
            return
        causes = (("wrong_scale", f"it is {self.ranks} times what it should be", want * self.ranks),
                  ("wrong_scale", f"it is 1/{self.ranks} of what it should be", want / self.ranks),
                  ("zero_gradient", "it is zero", torch.zeros_like(want)))
        code, cause = next(((code, words) for code, words, value in causes if close(got, value)),
                           ("wrong_gradient", f"off by up to {largest_difference(got, want):.2g}"))
        raise Wrong(f"{who} is not the complete layer's: {cause}", hint, code=code)

    def _sizes(self) -> int:
        """Elements of the rows that this rank sends in one direction: its own copies, and as many
        outputs as it has received copies."""
        tokens = self.x.flatten(0, -2)
        chosen = self.layer.router(tokens).topk(self.layer.k).indices.flatten()
        counts = chosen.bincount(minlength=EXPERTS).view(self.ranks, -1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        return int(chosen.numel() + theirs.sum()) * HIDDEN

    def _judge_traffic(self, traffic, direction, allowed, calls):
        require_group(traffic, self.group, f"{self.who}, {direction}")
        kinds = [call.kind for call in traffic.calls]
        others = [kind for kind in kinds if kind not in ("all_to_all", "send", "recv")]
        if others:
            name = others[0].replace("_", "-")
            raise Wrong(f"{self.who}: {direction} has {counted(len(others), name)}; a layer "
                        "needs all-to-alls only", "Each copy is sent to the rank that has its "
                        "expert, and to no other.", code="wrong_traffic")
        # The invariant: copies go once to their expert and their outputs once back, in backward
        # their gradients; no row more. Catches padding to equal parts.
        if (sent := numbers_sent(traffic.calls)) > allowed:
            raise Wrong(f"{self.who}: {direction} communicates {sent:,.0f} elements; the rows that "
                        f"this rank sends{' and its counts' * (calls == 3)} have {allowed:,}",
                        "Uneven splits: as many rows to each rank as it has to compute.",
                        code="wrong_traffic")
        if kinds.count("all_to_all") > calls:
            raise Wrong(f"{self.who}: {direction} has {kinds.count('all_to_all')} all-to-alls; "
                        f"{calls} are needed", "Forward sends counts, copies and outputs; backward "
                        "the gradients of outputs and of copies.", code="extra_collective")


def _parameter(module, kind) -> nn.Parameter | None:
    """The experts' parameter of this name."""
    return next((p for name, p in module.named_parameters()
                 if "experts." in f".{name}" and name.split(".")[-1] == kind), None)


# (code, in words, hint, what was done with the rows that arrived)
_SORT = ("The rows arrive sorted by rank. Sort them by expert, and put the outputs back into the "
         "order of arrival.")
_MISTAKES = (
    ("not_sorted", "`Experts` got the copies in the order of arrival, by rank, not by expert",
     _SORT, lambda rows, order, experts: experts(rows)),
    ("not_restored", "the outputs were returned sorted by expert, not in the order of arrival",
     _SORT, lambda rows, order, experts: experts(rows[order])),
    ("wrong_order", "the outputs were sorted once more: order.argsort() brings them back, `order` "
     "does not", _SORT, lambda rows, order, experts: experts(rows[order])[order]),
    ("wrong_order", "the copies were put in the inverse of the order that sorts them by expert",
     _SORT, lambda rows, order, experts: experts(rows[order.argsort()])[order]),
    ("not_sorted", "the outputs were put back, though the copies had not been sorted", _SORT,
     lambda rows, order, experts: experts(rows)[order.argsort()]))
