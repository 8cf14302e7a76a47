"""Exercise 7.4: an embedding of which each rank has its rows of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.checks.inputs import UnchangedInputs, require_dtype
from labs.checks.on_ranks import close, on_ranks, raise_on_all_ranks
from labs.checks.tolerances import SUMS
from labs.checks.verdicts import Wrong, check, kind_of
from labs.meters.traffic import Traffic
from labs.tensor_parallel.groups import groups_to_try, named_rank, require_value_error
from labs.tensor_parallel.kept_memory import StorageRef, surplus_bytes
from labs.workers import devices

HIDDEN = 5
HINTS = {
    "padding_idx must be within num_embeddings": "The padding row of the full vocabulary is on one "
    "rank, at its number there; the other ranks have none.",
    "index out of range in self": "A token of another rank has no row here: look up some row that "
    "there is, and put zeros in its place."}


@dataclass(frozen=True)
class Case:
    """rows: of the full vocabulary. padding: its padding_idx. shape: of the tokens."""

    rows: int = 24
    padding: int | None = None
    shape: tuple[int, ...] = (4, 9)
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return (f"{self.rows} rows" + f", padding_idx {self.padding}" * (self.padding is not None)
                + f", {str(self.dtype).removeprefix('torch.')}" * (self.dtype != torch.float32))


# The padding row is the first of all, one of the middle, and one of the last rank.
CASES = (Case(), Case(padding=0), Case(padding=7, shape=(40,)), Case(padding=20, shape=(2, 4, 6)),
         Case(rows=36, shape=(1, 36), dtype=torch.bfloat16))
UNEVEN = Case(rows=25, shape=(1, 30))  # rows that neither 2 nor 3 nor 4 ranks divide


@check("7.4", hints=HINTS)
def check_vocabulary_embedding(VocabularyParallelEmbedding: Callable):
    """VocabularyParallelEmbedding(embedding, group): a module with this rank's rows of an
    nn.Embedding; what it returns is that of the unsharded embedding, on every rank of the group."""
    on_ranks(_try_groups, VocabularyParallelEmbedding)
    return ("every rank returns what the unsharded embedding does and has 1/t of its rows; one "
            "all-reduce of b·s·h in forward, nothing in backward, and no gradient for the padding "
            "row of the one rank that has it")


def _try_groups(kind):
    for called, group in groups_to_try():
        number = dist.get_process_group_ranks(group)[0]  # other groups get other tokens
        for case in CASES:
            _try_case(kind, case, group, number, f"{called}, {case}")
        _try_uneven(kind, group, number, f"{called}, {UNEVEN}")


class _Run:
    """The student's module and the unsharded embedding on the same tokens, with the same gradient
    of the output on all ranks of the group."""

    def __init__(self, module, whole, case, number):
        generator = torch.Generator().manual_seed(100 + number)
        count = torch.Size(case.shape).numel()
        # every row is used, and the rows of one rank alone would leave nothing to sum
        several = torch.cat([torch.randperm(case.rows, generator=generator),
                             torch.randint(case.rows, (count,), generator=generator)])
        self.tokens = several[:count].view(case.shape).to(devices.device())
        self.upstream = torch.randn(*case.shape, HIDDEN, generator=generator).to(
            devices.device(), case.dtype)
        self.module, self.whole = module, whole
        self.want = whole(self.tokens)
        self.want.backward(self.upstream)

    def forward(self):
        kept = UnchangedInputs("forward", tokens=self.tokens)
        with Traffic() as traffic:
            self.got = self.module(self.tokens)
        self.sent_forward = traffic.calls
        return kept

    def backward(self):
        with Traffic() as traffic:
            self.got.backward(self.upstream.clone())
        self.sent_backward = traffic.calls


def _whole(case, number) -> nn.Embedding:
    """The embedding before it is divided; its padding row is not zero, as after loading weights."""
    # Called twice with the same seed: the student's class gets a second embedding with equal
    # numbers, so that no memory is shared with the one that the check compares with.
    torch.manual_seed(7 + number)
    whole = nn.Embedding(case.rows, HIDDEN, padding_idx=case.padding)
    nn.init.normal_(whole.weight)
    return whole.to(devices.device(), case.dtype)


def _try_case(kind, case, group, number, where):
    whole = _whole(case, number)
    given = _whole(case, number)
    # A StorageRef is weak, unlike UnchangedInputs, which is deleted with `given` before the memory
    # is judged.
    kept, original = UnchangedInputs("your class", embedding=given), StorageRef(given.weight)
    module = kind(given, group)
    raise_on_all_ranks(kept.judge)
    del given, kept
    raise_on_all_ranks(_judge_rows, module, whole, original, group, where)
    run = _Run(module, whole, case, number)
    unchanged = run.forward()
    raise_on_all_ranks(_judge_forward, run, unchanged, group, where)
    run.backward()
    raise_on_all_ranks(_judge_backward, run, group, where)


def _judge_rows(module, whole, original, group, where):
    rank, ranks = named_rank(group), dist.get_world_size(group)
    if not isinstance(module, nn.Module):
        raise Wrong(f"{where}: your class is {kind_of(module)}, not an nn.Module",
                    "class VocabularyParallelEmbedding(nn.Module), with super().__init__() first.",
                    code="wrong_type")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise Wrong(f"{where}: {rank}: module.weight is {kind_of(weight)}, not a parameter",
                    "self.weight = nn.Parameter(...): the optimizer must find the rows.",
                    code="wrong_type")
    want = whole.weight.chunk(ranks)[dist.get_rank(group)]  # (v/t, h)
    # The whole embedding on every rank is the lazy answer; rows in another order than the head's
    # would be no error here, but the loss counts on rank r having the r-th part.
    if weight.shape != want.shape or not torch.equal(weight, want):
        first = dist.get_rank(group) * len(want)
        raise Wrong(f"{where}: {rank} should have rows {first} to {first + len(want) - 1}, and its "
                    f"weight is {_which_rows(weight, whole.weight)}",
                    "Rank r of the group has the r-th of t equal parts, in order: "
                    "dist.get_rank(group), dist.get_world_size(group).",
                    code="not_sharded" if weight.shape == whole.weight.shape else "wrong_part")
    require_dtype(weight, whole.weight, f"{where}: the weight")
    if not weight.requires_grad:
        raise Wrong(f"{where}: {rank}: the weight has requires_grad=False",
                    "The unsharded embedding is trained, and so are its rows.",
                    code="requires_grad_changed")
    # A view, a copy of the full weight, or a reference to the embedding: nothing would be saved.
    allowed = want.numel() * want.element_size()
    if surplus := surplus_bytes(module, allowed):
        raise Wrong(f"{where}: {rank} holds {allowed + surplus:,} bytes for its {len(want)} rows "
                    f"of {allowed:,} bytes: the memory of the unsharded embedding is kept",
                    "A slice is a view of all rows: .clone() it. And keep no reference to the "
                    "embedding.", code="memory_kept")
    if original.is_alive():
        raise Wrong(f"{where}: {rank} keeps the memory of the unsharded embedding's weight",
                    "Keep no reference to the embedding or to its weight in your module.",
                    code="memory_kept")


def _which_rows(weight, whole) -> str:
    if weight.shape == whole.shape and torch.equal(weight, whole):
        return f"the unsharded embedding, {len(whole)} rows"
    starts = [first for first in range(len(whole) - len(weight) + 1)
              if weight.shape[1:] == whole.shape[1:]
              and torch.equal(weight, whole[first:first + len(weight)])]
    if starts and len(weight):
        return f"rows {starts[0]} to {starts[0] + len(weight) - 1}"
    return f"{kind_of(weight.detach())} with other numbers"


def _judge_forward(run, unchanged, group, where):
    rank, ranks = named_rank(group), dist.get_world_size(group)
    # The invariant: the sum over the ranks, in which each token's row comes from one rank and zeros
    # from all others.
    got, want, tokens = run.got, run.want.detach(), run.tokens
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        raise Wrong(f"{where}: {rank}: forward returns {kind_of(got)} for tokens of shape "
                    f"{list(tokens.shape)}, not a tensor of shape {list(want.shape)}",
                    code="wrong_type")
    unchanged.judge()
    require_dtype(got, want, f"{where}: {rank}: what forward returns")
    if not close(got.detach().float(), want.float()):
        _explain_forward(got.detach(), want, tokens, run.whole.weight.detach(), ranks,
                         dist.get_rank(group), f"{where}: {rank}")
    # b·s·h elements, all-reduced once; gathering the rows would move the whole vocabulary.
    _judge_collectives(run.sent_forward, want, f"{where}: {rank}")


def _explain_forward(got, want, tokens, weight, ranks, own, who):
    """Raises Wrong with the token that is wrong, the rank that has its row, and the cause."""
    rows, per_rank = len(weight), len(weight) // ranks
    of_rank = [weight[first:first + per_rank] for first in range(0, rows, per_rank)]
    owner = tokens // per_rank
    # What each mistake gives, for all tokens: (*tokens, h), or one such tensor for each rank.
    alone = want.masked_fill((owner != own)[..., None], 0)
    clamped = [part[(tokens - per_rank * r).clamp(0, per_rank - 1)]
               for r, part in enumerate(of_rank)]
    first = [part[(tokens - per_rank * r).masked_fill(owner != r, 0)]
             for r, part in enumerate(of_rank)]
    wrapped = [part[tokens % per_rank] for part in of_rank]
    # The factor of least squares: `got` is a multiple of `want` if this multiple is close to
    # it.
    scale = (got.double() * want).sum().item() / want.double().square().sum().item()
    unmasked = "For tokens of other ranks a rank looks up some row that it has: put zeros there " \
               "before the sum."
    scaled = "summed_too_often" if abs(scale - ranks) < 1e-3 else "wrong_scale"
    causes = (("not_summed", alone, "the ranks' results are not summed", "ReduceFromRegion.apply("
               "..., group) adds what the other ranks have found."),
              (scaled, scale * want, f"it is {scale:.4g} times the row", "Sum once, over zeros "
               "where another rank has the row, and scale nothing."),
              *(("not_masked", sum(each), "rows that ranks looked up for tokens of others are in "
                 "the sum", unmasked) for each in (clamped, first, wrapped)))
    wrong = ~torch.isclose(got.float(), want.float(), atol=SUMS).all(-1)
    token = int(tokens[wrong][0])
    code, cause, hint = next(
        ((code, f": {said}", hint) for code, value, said, hint in causes
         if close(got.float(), value.float())),
        ("wrong_row", "", "Is the first row of a rank dist.get_rank(group) times the rows of a "
         "rank, and is every token of another rank zero before the sum?"))
    raise Wrong(f"{who}: token {token}, whose row is on rank {token // per_rank} of the group, "
                f"does not give that row{cause}", hint, code=code)


def _judge_collectives(calls, want, who):
    elements = want.numel()
    if len(calls) == 1 and calls[0].kind == "all_reduce" and calls[0].elements == elements:
        # Of all ranks one adds to zeros, so no sum needs more digits than the row has.
        if calls[0].bytes <= max(4, want.element_size()) * elements:
            return
        raise Wrong(f"{who}: forward's all-reduce carries {calls[0].bytes // elements} bytes for "
                    "each number", "Sum in the weight's own dtype: all ranks but one add zeros.",
                    code="wrong_traffic_dtype")
    names = ", ".join(f"{call.kind} of {call.elements:,}" for call in calls) or "none"
    raise Wrong(f"{who}: forward's collectives ({names} elements) are not one all-reduce of "
                f"b·s·h = {elements:,}", "Only the result is summed: rows stay where they are.",
                code="wrong_traffic")


def _judge_backward(run, group, where):
    rank, ranks, own = named_rank(group), dist.get_world_size(group), dist.get_rank(group)
    who, got = f"{where}: {rank}", run.module.weight.grad
    if got is None:
        raise Wrong(f"{who}: after backward weight has no gradient",
                    "Is the weight an nn.Parameter of its own, and is forward differentiable?",
                    code="gradient_missing")
    # The invariant: the gradient is these rows of the whole embedding's, zero in the padding row;
    # the rank that has this row counts it from its own first row, and no other rank has one.
    every = run.whole.weight.grad.chunk(ranks)
    want = every[own]
    if not close(got.float(), want.float()):
        _explain_gradient(got.float(), want.float(), run, ranks, own, who)
    # The gradient of the output is the same on all ranks: there is nothing to reduce.
    if run.sent_backward:
        call = run.sent_backward[0]
        raise Wrong(f"{who}: backward sends {call.elements:,} elements in {call.kind}",
                    "The gradient of the output is whole on every rank, so backward of the sum is "
                    "the identity: ReduceFromRegion.", code="extra_collective")


def _explain_gradient(got, want, run, ranks, own, who):
    first, padding = own * len(want), run.whole.padding_idx
    row = int((~torch.isclose(got, want, atol=SUMS)).any(-1).nonzero()[0])
    if close(got, ranks * want):
        raise Wrong(f"{who}: the gradient is {ranks} times that of the unsharded embedding",
                    "All ranks have the same loss: backward of the sum is the identity, not "
                    "another sum.", code="summed_too_often")
    if first + row == padding:
        raise Wrong(f"{who}: row {first + row}, the padding row, gets a gradient",
                    "On the rank that has it, F.embedding takes padding_idx as that rank counts.",
                    code="padding_row_trained")
    if not got[row].any() and padding is not None:
        raise Wrong(f"{who}: row {first + row} gets no gradient, as if it were the padding row, "
                    f"which is row {padding}",
                    "Only one rank has the padding row; for the others padding_idx is None. "
                    "A negative number counts from the end.", code="padding_row_misplaced")
    raise Wrong(f"{who}: the gradient of row {first + row} is not that of the unsharded embedding",
                "Does backward add to a row what belongs to tokens of other ranks?",
                code="wrong_gradient")


def _try_uneven(kind, group, number, where):
    """Rows that the ranks do not divide: a ValueError, or rows of padding that nobody looks up."""
    whole = _whole(UNEVEN, number)
    try:
        module = kind(_whole(UNEVEN, number), group)
    except Exception:  # of which kind, and what it says, is judged
        require_value_error(lambda: kind(_whole(UNEVEN, number), group),
                            f"an embedding of {UNEVEN.rows} rows",
                            (UNEVEN.rows, dist.get_world_size(group)))
        return
    # No error: then every row has to be on a rank. The tokens name every row, so that a last row
    # that was left out shows.
    run = _Run(module, whole, UNEVEN, number)
    run.forward()
    raise_on_all_ranks(_judge_uneven, run, group, where)


def _judge_uneven(run, group, where):
    got = run.got
    if not isinstance(got, torch.Tensor) or got.shape != run.want.shape or not close(
            got.detach(), run.want.detach()):
        raise Wrong(f"{where}: {named_rank(group)}: no ValueError, and what forward returns is not "
                    "that of the unsharded embedding: some rows are on no rank",
                    f"Raise ValueError where the ranks of the group do not divide {UNEVEN.rows}.",
                    code="no_error")
