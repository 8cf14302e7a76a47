"""Exercise 9.13: DiLoCo. Each host trains by itself; every few steps the hosts average how far they
have come, and an outer optimizer takes that for a gradient."""

import copy
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.checks.generator import new_generator
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Verdict, Wrong, check, shows
from labs.meters.traffic import Traffic
from labs.pictures.tables import Table
from labs.predictions.communication.host_links import Topology
from labs.scaling.link_collectives import count_bytes
from labs.scaling.on_hosts import run_on_hosts
from labs.training import data
from labs.training.models import EdgeCaseModel, trainable
from labs.workers.hosts import hosts_unavailable

EVERY, ROUNDS = 3, 3
SETTINGS = {"inner_lr": 1e-3, "outer_lr": 0.7, "momentum": 0.9}  # outer ones: the paper's
AWAY = 0.01  # of the way that training took: the order of sums changes 1e-6 of it
SENT = 1.1  # times the trainable parameters in a round: counts may be sent, too
SHOWN_EVERY, SHOWN_STEPS = 8, 16
_ORDER = ("All ranks reduce the same tensors in the same order: one flat tensor, or the order of "
          "model.parameters().")
_HINTS = dict.fromkeys(("collectives_differ", "deadlock", "no_progress", "rank_died"), _ORDER)


@check("9.13", _HINTS)
def check_diloco(train_diloco: Callable):
    """train_diloco(model, batches, every, inner_lr, outer_lr, momentum): trains the model in place,
    inner AdamW on each rank's own batches, and after each `every` of them a Nesterov step of SGD on
    the mean difference, from the same parameters on all ranks."""
    on_ranks(_try, train_diloco, new_generator().randrange(1000), world_sizes=(2, 3, 1))
    return (f"over {ROUNDS} rounds of {EVERY} steps on 1, 2 and 3 ranks the parameters are those "
            "of the formulas, equal on all ranks, and a round sends each of them once")


def _batches(seed, rank, steps=EVERY * ROUNDS) -> list[dict]:
    return data.xy_batches(steps, 2, seed=seed + 100 * rank)


def _try(train_diloco, seed):
    model = EdgeCaseModel(seed=seed)
    initial = copy.deepcopy(model)
    with Traffic() as traffic:
        train_diloco(model, _batches(seed, dist.get_rank()), EVERY, **SETTINGS)
    raise_on_all_ranks(_judge, model, initial, seed, traffic)


def simulate(initial: EdgeCaseModel, batches: list[list[dict]], every: int, inner_lr: float,
             outer_lr: float, momentum: float, nesterov: bool = True, keeps_inner: bool = True,
             keeps_outer: bool = True, scale: float = 1.0) -> torch.Tensor:
    """The trainable parameters, flat, after DiLoCo on batches[rank][step], computed by one process.
    keeps_…: whether an optimizer keeps its state between rounds. scale: of the mean difference."""
    models = [copy.deepcopy(initial) for _ in batches]
    of_models = [[p for _, p in trainable(model)] for model in models]
    shared = [p.detach().clone() for p in of_models[0]]

    def inners():
        return [torch.optim.AdamW(own, lr=inner_lr) for own in of_models]

    def outer_of():
        return torch.optim.SGD(shared, lr=outer_lr, momentum=momentum,
                               nesterov=nesterov and momentum > 0)

    inner, outer = inners(), outer_of()
    for first in range(0, len(batches[0]), every):
        inner, outer = inner if keeps_inner else inners(), outer if keeps_outer else outer_of()
        for model, optimizer, own in zip(models, inner, batches, strict=True):
            for batch in own[first:first + every]:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for index, s in enumerate(shared):
                s.grad = scale * (s - sum(own[index] for own in of_models) / len(models))
            outer.step()
            for own in of_models:
                for p, s in zip(own, shared, strict=True):
                    p.copy_(s)
    return torch.cat([s.flatten() for s in shared])


def _judge(model, initial, seed, traffic):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    where = f"{ranks} rank{'s' * (ranks > 1)}"
    batches = [_batches(seed, each) for each in range(ranks)]
    found = torch.cat([p.detach().flatten() for _, p in trainable(model)])
    start = torch.cat([p.detach().flatten() for _, p in trainable(initial)])
    want = simulate(initial, batches, EVERY, **SETTINGS)

    def is_like(other) -> bool:
        return bool((found - other).norm() <= AWAY * (want - start).norm())

    def variant(**changes):
        return simulate(initial, batches, EVERY, **{**SETTINGS, **changes})

    if is_like(start):
        raise Wrong(f"{where}: rank {rank}: the parameters are as they were", "Train `model` in "
                    "place.", code="not_trained")
    if not is_like(want):
        alone = simulate(initial, [batches[rank]], EVERY, **SETTINGS)
        causes = (
            ("not_averaged", alone, "those of this rank's batches alone: nothing is averaged"),
            ("parameters_averaged", variant(outer_lr=1.0, momentum=0.0),
             "averages of the ranks' parameters: without an outer optimizer"),
            ("no_nesterov", variant(nesterov=False), "those of plain momentum, not Nesterov's"),
            ("wrong_sign", variant(scale=-1.0), "those of a difference with the opposite sign"),
            ("sum_not_mean", variant(scale=float(ranks)), "those of the sum of all differences"),
            ("inner_state_lost", variant(keeps_inner=False),
             "those of an AdamW that is new in each round"),
            ("outer_state_lost", variant(keeps_outer=False),
             "those of an outer optimizer that is new in each round"))
        for code, other, words in causes:
            if is_like(other):
                raise Wrong(f"{where}: rank {rank}: the parameters are {words}",
                            "shared − mean of the ranks' parameters is the outer gradient.",
                            code=code)
        raise Wrong(f"{where}: rank {rank}: the parameters are not DiLoCo's",
                    "After the outer step all ranks go on from `shared`, the same on all.",
                    code="wrong_parameters")
    for (name, p), (_, before) in zip(model.named_parameters(), initial.named_parameters(),
                                      strict=True):
        if not p.requires_grad and not torch.equal(p, before):
            raise Wrong(f"{where}: {name!r} is frozen, and has changed", code="frozen_changed")
    # Invariant: one difference a round. Catches data parallelism in the inner steps.
    sent = sum(call.elements for call in traffic.calls)
    if sent > SENT * ROUNDS * len(want):
        raise Wrong(f"{where}: rank {rank} hands collectives {sent:,} elements in {ROUNDS} rounds; "
                    f"the parameters are {len(want):,}", "The ranks communicate once a round: each "
                    "trainable parameter's difference.", code="too_much_sent")


# ---- on the link between two hosts

@shows("9.13")
def show_diloco(train_diloco: Callable) -> Table | Verdict:
    """Trains on two hosts, with one rank each, and counts what passes the link of a host: for
    DiLoCo, and for an all-reduce of the gradients in each step."""
    # Before the hosts start: an exercise that is not filled in yet is waited for.
    on_ranks(_try, train_diloco, 0, world_sizes=(1,))
    if unavailable := hosts_unavailable():
        return Verdict("9.13", None, unavailable)
    found = run_on_hosts(_count, train_diloco, topology=Topology(hosts=2, ranks=1))[0]
    rows = [(name, f"{sent:,}", f"{sent / found['parameters']:.1f}")
            for name, sent in found["sent"].items()]
    return Table(f"{SHOWN_STEPS} steps on two hosts: bytes on the link of host 0",
                 ("", "bytes", "times the parameters' bytes"), rows,
                 note="counted by the kernel, with TCP's headers and acknowledgements")


def _count(train_diloco) -> dict:
    batches = _batches(7, dist.get_rank(), SHOWN_STEPS)

    def data_parallel():
        model = EdgeCaseModel()
        optimizer = torch.optim.AdamW([p for _, p in trainable(model)], lr=SETTINGS["inner_lr"])
        for batch in batches:
            model(**batch).loss.backward()
            gradients = [p.grad for _, p in trainable(model) if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient) / dist.get_world_size())
            optimizer.step()
            optimizer.zero_grad()

    def diloco():
        train_diloco(EdgeCaseModel(), batches, SHOWN_EVERY, **SETTINGS)

    work = {"data parallel": data_parallel, f"DiLoCo, every {SHOWN_EVERY} steps": diloco}
    parameters = 4 * sum(math.prod(p.shape) for _, p in trainable(EdgeCaseModel()))
    return {"sent": {name: count_bytes(name, 0, run).sent for name, run in work.items()},
            "parameters": parameters}
