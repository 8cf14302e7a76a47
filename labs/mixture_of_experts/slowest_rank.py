"""How long ranks wait for the one whose experts get the most copies."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.meters.metrics import Metric
from labs.pictures import marks
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.training import data
from labs.training.mixtures import Mixture
from labs.workers import devices
from labs.workers.launcher import launch

TITLE = "The slowest rank"
RANKS, EXPERTS, K = 4, 8, 2
SEQUENCES, CONTEXT = 32, 64  # of a rank
PACE = 20e-6  # seconds for a copy
ROUNDS = 5  # of which the fastest is shown, which other programs disturbed least


@dataclass(frozen=True)
class Waited:
    """What a rank did in one layer's forward. copies: for its experts. computing, waiting: seconds
    in the experts, and then in the all-to-all that returns the outputs."""

    copies: int
    computing: float
    waiting: float

    @property
    def total(self) -> float:
        """Seconds from the arrival of the copies to that of the outputs."""
        return self.computing + self.waiting


@shows(TITLE)
def show_slowest_rank() -> Picture:
    """Measures one layer on 4 ranks at a stated pace, with an untrained router and with equal
    counts: the seconds that each rank computes and waits, beside largest / mean."""
    with devices.send_recv_device(RANKS):  # gloo's all-to-all cannot send tensors of a shared GPU
        by_rank = launch(_measure, ranks=RANKS, quiet=True)
    untrained, equal = zip(*by_rank, strict=True)
    copies = [rank.copies for rank in untrained]
    mean = sum(copies) / RANKS
    predicted = max(copies) / mean
    slower = max(rank.total for rank in untrained) / max(rank.total for rank in equal)
    names = [f"rank {rank}: {count:,} copies" for rank, count in enumerate(copies)]
    names.append(f"every rank: {mean:,.0f}")
    guess = guessed("9.6b")
    values = [{"computing": rank.computing, "exposed": rank.waiting}
              for rank in (*untrained, max(equal, key=lambda rank: rank.total))]
    panel = Panel("experts of one layer, forward", "ms", values, size=1e-3,
                  predicted=[PACE * max(copies)] * RANKS + [PACE * mean],
                  guessed=[None if guess is None else PACE * mean * guess] * RANKS + [None])
    lesson = (f"{max(copies):,} copies on one rank, {mean:,.0f} is the mean: "
              f"{slower:.2f} times slower, predicted {predicted:.2f}")
    picture = side_by_side(names, [panel], lesson=lesson,
                           answer=marks.answered(guess, slower, "times"),
                           note=f"{EXPERTS} experts, {K} for each token, {1e6 * PACE:.0f} µs for a "
                                "copy. Exposed: waiting in the all-to-all that returns the "
                                "outputs.\nLast row: with equal counts.")
    return Picture(picture.figure, picture.text, data=untrained + equal, metrics=[
        Metric("slower than with equal counts", slower, "times", predicted)])


def _measure() -> tuple[Waited, Waited]:
    """On a rank: with the router's choice, and with equal counts."""
    torch.set_num_threads(1)
    model = Mixture(layers=2, experts=EXPERTS, k=K, context=CONTEXT).to(devices.device())
    windows = data.windows(SEQUENCES, CONTEXT - 1, seed=dist.get_rank()).to(devices.device())
    found = []
    layer = model.layers[-1].mlp
    layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        model(windows)
        tokens, = found  # (tokens, hidden): what the layer's router sees
        chosen = layer.router(tokens).topk(K).indices
        even = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape) % EXPERTS
        return tuple(_fastest(layer.experts, tokens, choice) for choice in (chosen, even))


def _fastest(experts, tokens, chosen) -> Waited:
    """The round that took all ranks the least time; the same one on every rank."""
    rounds = [_forward(experts, tokens, chosen) for _ in range(ROUNDS + 1)][1:]  # it connects
    slowest = torch.tensor([one.total for one in rounds], device=tokens.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return rounds[int(slowest.argmin())]


def _forward(experts, tokens, chosen) -> Waited:
    """Dispatch, this rank's experts, and back."""
    order = chosen.flatten().argsort(stable=True)
    copies, counts = tokens[order // K], chosen.flatten().bincount(minlength=EXPERTS)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    send, receive = (sent.view(RANKS, -1).sum(1).tolist() for sent in (counts, theirs))
    arrived = copies.new_empty(sum(receive), copies.shape[1])
    outputs = torch.empty_like(copies)
    dist.all_to_all_single(arrived, copies, receive, send)
    devices.synchronize()
    dist.barrier()  # all begin at once: what is measured is the experts and the way back
    began = time.perf_counter()
    computed = _paced(experts, arrived, began)
    ended = time.perf_counter()
    dist.all_to_all_single(outputs, computed, send, receive)
    devices.synchronize()
    return Waited(len(arrived), ended - began, time.perf_counter() - ended)


def _paced(experts, arrived, began) -> torch.Tensor:
    """Outputs in the order of arrival, after PACE seconds for each copy: ranks share the cores of
    a CPU, so their own speed says nothing. Which of the experts computes does not matter here."""
    outputs = experts(arrived, [len(arrived)] + [0] * (EXPERTS - 1))
    devices.synchronize()
    time.sleep(max(0.0, PACE * len(arrived) - (time.perf_counter() - began)))
    return outputs
