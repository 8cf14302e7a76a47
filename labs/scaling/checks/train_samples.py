"""Exercise 6.1: which samples the ranks have drawn, in which epoch and order."""

from collections import Counter

import torch

from labs.exercises.verdicts import Wrong
from labs.scaling.runs.expected import CONTEXT
from labs.scaling.runs.forked import Run
from labs.training import data
from labs.words import listed

_SAMPLER = ("DistributedSampler(windows) gives each rank its own share of the indices; the loader "
            "gets it as sampler=.")
Drawn = list[list[torch.Tensor]]  # [step][rank]: tokens, (number, CONTEXT)


def judge(run: Run, when: str, samples: int, numbers: dict[str, int]) -> Drawn:
    """Raises Wrong unless the ranks have drawn each sample once an epoch, in another order each
    time. Where the number does not divide, a sampler may repeat or drop a few."""
    steps = [len(record.steps) for record in run.records]
    if len(set(steps)) > 1:
        raise Wrong(f"{when}: the ranks took {listed(steps)} optimizer steps", "All ranks take the "
                    "same number of steps, or some wait for ever for the others' gradients.")
    orders = [_indices(record, rank, when, samples, numbers["seed"])
              for rank, record in enumerate(run.records)]
    total, wanted = sum(map(len, orders)), samples * numbers["epochs"]
    if total <= wanted / 2:
        raise Wrong(f"{when}: the ranks draw {total} samples together; {numbers['epochs']} epochs "
                    f"of {samples} are {wanted}", "`epochs` says how often all samples are drawn.")
    epochs = [_split(order, numbers["epochs"], rank, when) for rank, order in enumerate(orders)]
    for epoch in range(numbers["epochs"]):
        _judge_epoch([of_rank[epoch] for of_rank in epochs], f"{when}, epoch {epoch}", samples,
                     run.ranks, numbers["batch"])
    # The epoch is part of the shuffle's seed: without set_epoch all epochs have the same order.
    for rank, of_rank in enumerate(epochs):
        if of_rank[0] == of_rank[1]:
            raise Wrong(f"{when}: rank {rank} draws the same samples in the same order in epochs 0 "
                        "and 1", "sampler.set_epoch(epoch) before each epoch changes the shuffle.")
    return [[torch.cat([batch.rows for batch in record.steps[step].batches])
             for record in run.records] for step in range(steps[0])]


def _indices(record, rank, when, samples, seed) -> list[int]:
    """The samples in the order in which the rank drew them."""
    known = {tuple(row): index for index, row in enumerate(
        data.windows(samples, CONTEXT, seed)[:, :-1].tolist())}
    rows = [tuple(row) for step in record.steps for batch in step.batches
            for row in batch.rows.tolist()]
    for row in rows:
        if row not in known:
            raise Wrong(f"{when}: rank {rank} trains on {len(row)} tokens that are none of the "
                        f"samples", "The model gets the windows that the loader gives, whole, as "
                                    "input_ids and as labels: it shifts the labels itself.")
    if any(not step.batches for step in record.steps):
        raise Wrong(f"{when}: rank {rank} takes an optimizer step without a batch before it")
    return [known[row] for row in rows]


def _split(order, epochs, rank, when) -> list[list[int]]:
    size = len(order) // epochs
    if len(order) % epochs:
        raise Wrong(f"{when}: rank {rank} draws {len(order)} samples in {epochs} epochs, not the "
                    "same number in each")
    return [order[number * size:(number + 1) * size] for number in range(epochs)]


def _judge_epoch(of_ranks, when, samples, ranks, batch):
    counts = Counter(index for indices in of_ranks for index in indices)
    every = [rank for rank, indices in enumerate(of_ranks) if len(set(indices)) == samples]
    if len(every) == ranks:
        raise Wrong(f"{when}: every rank draws all {samples} samples: {ranks} ranks do the work of "
                    "one", _SAMPLER)
    missing = samples - len(counts)
    repeated = [index for index, count in counts.items() if count > 1]
    if samples % ranks == 0:
        _judge_exact(of_ranks, when, samples, missing, repeated)
        return
    spare = ranks * batch  # what a sampler may repeat, or a loader drop, less one
    extra = sum(counts.values()) - len(counts)
    if missing and extra or missing >= spare or extra >= spare or max(counts.values()) > 2:
        raise Wrong(f"{when}: {missing} samples are drawn by no rank, and {len(repeated)} more "
                    "than once; a sampler may repeat a few, or drop a few", _SAMPLER)


def _judge_exact(of_ranks, when, samples, missing, repeated):
    """Where the number divides, each sample is drawn exactly once."""
    if repeated:
        index = repeated[0]
        who = [rank for rank, indices in enumerate(of_ranks) if index in indices]
        by = (f"by ranks {listed(who)}" if len(who) > 1 else f"twice by rank {who[0]}")
        raise Wrong(f"{when}: sample {index} is drawn {by}, {len(repeated)} samples more than "
                    f"once, and {missing} of {samples} by nobody",
                    "The order is the same permutation on all ranks, from the same seed; each rank "
                    "takes its own part of it.")
    if missing:
        raise Wrong(f"{when}: {missing} of {samples} samples are drawn by no rank", _SAMPLER)
