"""Exercise 9.3: experts on several ranks, and rows sent to them and back."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.checks.guesses import guessed
from labs.checks.on_ranks import on_ranks
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.meters.collective_hooks import CollectiveObserver
from labs.mixture_of_experts.all_to_all_trial import AllToAllTrial, equal_totals, some_nothing
from labs.mixture_of_experts.parallel_layer_trial import CASES, ParallelLayerTrial
from labs.pictures import marks, palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.tensor_parallel.groups import groups_to_try
from labs.training import data
from labs.training.mixtures import Mixture
from labs.workers import devices
from labs.workers.launcher import launch

HINTS = {
    "Split sizes": "`receive` has the splits of the output, which has sum(receive) rows; `send` "
    "those of the input. In backward the two change roles.",
    "invalid gradient": "backward returns a gradient for each row that forward was given. The "
    "gradients that it gets are of rows that came from other ranks: send them back there.",
    "returned an incorrect number of gradients": "backward returns a gradient for each argument of "
    "forward: one for the rows, and None for receive, send and group.",
    "Boolean value of Tensor": "Splits are lists of ints: .tolist().",
    "can only save variables": "save_for_backward is for tensors. What is none becomes an "
    "attribute: ctx.send = send.",
    "alltoall: invalid tensor size": "With gloo `dist.all_to_all` sends equal parts only: "
    "`dist.all_to_all_single` takes uneven ones.",
    "different dtypes": "What arrives has the dtype of what is sent: rows.new_empty(...).",
    "is shorter than argument": "`Experts` takes one count for each expert of this rank, of the "
    "copies from all ranks together.",
    "split_with_sizes": "`Experts` computes the rows that have arrived: theirs.sum(0) says how "
    "many of them are of each expert.",
    "is out of bounds for dimension 0": "`compute` returns an output for each row of `copies`: are "
    "the outputs sent back to the ranks from which the copies came?",
    "'NoneType' object is not subscriptable": "Does `compute` return its outputs?",
    "in->size % context->size": "The counts are of all experts, so every rank has the complete "
    "router.",
    "Number of tensor splits": "Pass `group` on to every collective: it has a split for each of "
    "its ranks, as counts.sum(1) and theirs.sum(1) do.",
    "which expects": "Each rank learns from `theirs` how many rows come from every other one: "
    "`receive` are its sums, `send` those of `counts`. In AllToAll the output has sum(receive) "
    "rows, and `receive` comes before `send`.",
    "calls no further collective": "An all-to-all is for all ranks of the group: one without rows "
    "takes part all the same, with zeros in its splits."}


@check("9.3", hints=HINTS)
def check_expert_parallel(AllToAll, ExpertParallelLayer):
    """AllToAll.apply(rows, receive, send, group): the rows that arrive. ExpertParallelLayer(layer,
    group): a module with this rank's experts, and the output of the complete layer."""
    # 3 ranks first: on 2 ranks that send each other equally many rows, swapped splits are right.
    on_ranks(_try_both, AllToAll, ExpertParallelLayer, world_sizes=(3, 2, 4))
    return ("outputs and all gradients are those of the complete layer on 2, 3 and 4 ranks and on "
            "a group of 2 of them, also where a rank has no tokens or receives none; each rank has "
            "1/N of the experts, and sends each copy once to its expert and once back")


def _try_both(all_to_all, make):
    if not callable(getattr(all_to_all, "apply", None)):
        raise Wrong(f"AllToAll is {kind_of(all_to_all)}, which has no `apply`",
                    "class AllToAll(torch.autograd.Function): ...", code="wrong_type")
    tried = list(groups_to_try())
    # Each group with the one at the mirrored place of the list: on 4 ranks another group.
    for (words, group), (_, other) in zip(tried, reversed(tried), strict=True):
        AllToAllTrial(words, group, other, equal_totals).judge(all_to_all)
        AllToAllTrial(words, group, other, some_nothing, (2, 3), torch.float64,
                      strided=True).judge(all_to_all)
    for words, group in tried:
        for case in CASES:
            ParallelLayerTrial(words, group, case).judge(make)


RANKS, BATCH, SEQUENCE, HIDDEN = 4, 4, 64, 64
_NAMES = ("counts", "copies, to the experts", "outputs, back",
          "gradients of outputs, to the experts", "gradients of copies, back")


@shows("9.3")
def show_bytes(ExpertParallelLayer: Callable) -> Picture:
    """Draws what each all-to-all of a layer and step sends to other ranks, the mean of 4 ranks,
    with the formula for tokens that spread evenly: k·b·s·h·(N-1)/N elements."""
    found = torch.tensor(launch(_sent_by_layer, ExpertParallelLayer, ranks=RANKS, quiet=True))
    sent = found.double().mean(0)  # (all-to-alls,)
    unit = 4 * BATCH * SEQUENCE * HIDDEN  # bytes of b·s·h elements
    k = Mixture(layers=1).layers[0].mlp.k
    even = k * unit * (RANKS - 1) / RANKS
    rows = [Bar(name, nbytes / 1e3, None if name == "counts" else even / 1e3,
                colour=palette.COLLECTIVES["all_to_all"])
            for name, nbytes in zip(_NAMES, sent.tolist(), strict=True)]
    total = float(sent.sum()) / unit
    each = found.sum(1) / unit
    return bars(
        rows, "kB", "to other ranks, of one layer and step",
        note=f"predicted: k·b·s·h·(N − 1)/N elements of 4 bytes, if tokens spread evenly\n"
        f"measured: the mean of {RANKS} ranks; one rank sends {each.min():.2f} to {each.max():.2f} "
        "times b·s·h·4 bytes in all",
        lesson=f"A rank sends {total:.2f} times b·s·h·4 bytes, in four all-to-alls of rows; the "
        f"counts are {sent[0]:.0f} bytes",
        answer=marks.answered(guessed("9.3"), total, "times b·s·h·4 bytes"))


def _sent_by_layer(make) -> list[int]:
    """On a rank: bytes that each all-to-all of a step sends to other ranks, in order."""
    model = Mixture(layers=1, hidden=HIDDEN, ffn=HIDDEN).to(devices.device())
    model.layers[0].mlp = make(model.layers[0].mlp, dist.group.WORLD)
    [batch] = data.lm_batches(1, RANKS * BATCH, SEQUENCE)
    mine = data.shard(batch, dist.get_rank(), RANKS)
    with _SentToOthers() as observer:
        model(**{name: tensor.to(devices.device()) for name, tensor in mine.items()}
              ).loss.backward()
    return observer.sent


class _SentToOthers(CollectiveObserver):
    """Bytes of each all-to-all, without the part that a rank sends to itself."""

    def __init__(self):
        self.sent: list[int] = []

    def before(self, collective):
        if collective.kind == "all_to_all":
            self.sent.append(collective.bytes_to_others(dist.get_rank()))
