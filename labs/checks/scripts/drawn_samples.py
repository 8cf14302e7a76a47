"""Which samples the ranks of a script have drawn, in which epoch, order and batches."""

from collections import Counter

import torch

from labs.checks.scripts.forked import Run
from labs.checks.verdicts import Wrong
from labs.words import counted, listed

_SAMPLER = ("DistributedSampler(windows) gives each rank its own share of the indices; the loader "
            "gets it as sampler=.")
_DROPPED = "With drop_last the loader leaves out a rank's last batch, which is shorter."


def judge(run: Run, when: str, rows: torch.Tensor, number: int, batch: int) -> None:
    """Raises Wrong unless the ranks have drawn each sample once an epoch, in another order each
    time, in `number` epochs. rows: the samples' tokens, (samples, context). Where their number does
    not divide, a sampler may repeat or drop a few."""
    steps = [len(record.steps) for record in run.records]
    # Invariant: all ranks take equally many steps. Without a sampler that pads or drops samples,
    # one rank has a batch more, and waits for ever in its all-reduce.
    if len(set(steps)) > 1:
        raise Wrong(f"{when}: the ranks took {listed(steps)} optimizer steps", "All ranks take the "
                    "same number of steps, or some wait for ever for the others' gradients.",
                    code="steps_differ")
    samples, orders = len(rows), []
    for rank in range(run.ranks):
        _judge_rows(run, rank, rows, when)
        orders.append([index for step in indices(run, rank, rows) for part in step
                       for index in part])
    total, wanted = sum(map(len, orders)), samples * number
    if total <= wanted / 2 or total < wanted and total % samples == 0:
        raise Wrong(f"{when}: the ranks draw {total} samples together; {number} epochs "
                    f"of {samples} are {wanted}", "`epochs` says how often all samples are drawn.",
                    code="wrong_count")
    epochs = [_split(order, number, rank, when) for rank, order in enumerate(orders)]
    for epoch in range(number):
        _judge_epoch([of_rank[epoch] for of_rank in epochs], f"{when}, epoch {epoch}", samples,
                     run.ranks, batch)
    # The epoch is part of the shuffle's seed: without set_epoch all epochs have the same order.
    for rank, of_rank in enumerate(epochs):
        if of_rank[0] == of_rank[1] == sorted(of_rank[0]):
            raise Wrong(f"{when}: rank {rank} draws its samples in the order in which they lie, in "
                        "each epoch", "DistributedSampler shuffles where shuffle is not False; "
                        "sampler.set_epoch(epoch) before each epoch then changes the order.",
                        code="not_shuffled")
        if of_rank[0] == of_rank[1]:
            raise Wrong(f"{when}: rank {rank} draws the same samples in the same order in epochs 0 "
                        "and 1", "sampler.set_epoch(epoch) before each epoch changes the shuffle.",
                        code="same_order_each_epoch")


def indices(run: Run, rank: int, rows: torch.Tensor) -> list[list[list[int]]]:
    """[step][micro-batch]: the samples, by their place in `rows`, that a rank trained on."""
    place = {tuple(row): index for index, row in enumerate(rows.tolist())}
    return [[[place[tuple(row)] for row in batch.rows.tolist()] for batch in step.batches]
            for step in run.records[rank].steps]


def _judge_rows(run, rank, rows, when):
    known = set(map(tuple, rows.tolist()))
    for step in run.records[rank].steps:
        if not step.batches:
            raise Wrong(f"{when}: rank {rank} takes an optimizer step without a batch before it",
                        code="step_without_batch")
        for row in (row for batch in step.batches for row in batch.rows.tolist()):
            if tuple(row) not in known:
                raise Wrong(f"{when}: rank {rank} trains on {len(row)} tokens that are none of the "
                            "samples", "The model gets the samples that the loader gives, whole, "
                            "as input_ids: it shifts the labels itself.", code="wrong_inputs")


def _split(order, epochs, rank, when) -> list[list[int]]:
    size = len(order) // epochs
    if len(order) % epochs:
        raise Wrong(f"{when}: rank {rank} draws {len(order)} samples in {epochs} epochs, not the "
                    "same number in each", code="epochs_differ")
    return [order[number * size:(number + 1) * size] for number in range(epochs)]


def _judge_epoch(of_ranks, when, samples, ranks, batch):
    counts = Counter(index for indices in of_ranks for index in indices)
    # Invariant: the ranks partition the samples of an epoch. Catches a loader without a sampler,
    # whose ranks all draw the same samples: the job is right and N times too slow.
    every = [rank for rank, indices in enumerate(of_ranks) if len(set(indices)) == samples]
    if len(every) == ranks > 1:
        raise Wrong(f"{when}: every rank draws all {samples} samples: {ranks} ranks do the work of "
                    "one", _SAMPLER, code="not_sharded")
    missing = samples - len(counts)
    repeated = [index for index, count in counts.items() if count > 1]
    # Where the number of samples does not divide, DistributedSampler repeats some by default, and
    # drops some with drop_last: both are right, but not both at once.
    if samples % ranks == 0:
        last = samples // ranks % batch  # of a rank, in its shorter batch
        _judge_exact(of_ranks, when, samples, missing, repeated,
                     _DROPPED if missing == ranks * last else _SAMPLER)
        return
    spare = ranks * batch  # what a sampler may repeat, or a loader drop, less one
    extra = sum(counts.values()) - len(counts)
    if missing and extra or missing >= spare or extra >= spare or max(counts.values()) > 2:
        raise Wrong(f"{when}: {missing} samples are drawn by no rank, and {len(repeated)} more "
                    "than once; a sampler may repeat a few, or drop a few", _SAMPLER,
                    code="samples_not_partitioned")


def _judge_exact(of_ranks, when, samples, missing, repeated, hint):
    """Where the number divides, each sample is drawn exactly once. hint: on the missing ones."""
    if repeated:
        index = repeated[0]
        who = [rank for rank, indices in enumerate(of_ranks) if index in indices]
        by = (f"by ranks {listed(who)}" if len(who) > 1 else f"twice by rank {who[0]}")
        raise Wrong(f"{when}: sample {index} is drawn {by}, {len(repeated)} samples more than "
                    f"once, and {missing} of {samples} by nobody",
                    "The order is the same permutation on all ranks, from the same seed; each rank "
                    "takes its own part of it.", code="samples_not_partitioned")
    if missing:
        raise Wrong(f"{when}: {missing} of {samples} samples are drawn by no rank", hint,
                    code="samples_lost")


def judge_batches(run: Run, when: str, epochs: int, batch: int) -> None:
    """Raises Wrong unless a step has `batch` samples on each rank, and the last one of an epoch
    what is left: with another batch, the number of steps and the gradients are others."""
    for rank, record in enumerate(run.records):
        sizes = [sum(len(part.rows) for part in step.batches) for step in record.steps]
        drawn = sum(sizes) // epochs
        wanted = epochs * ([batch] * (drawn // batch) + [drawn % batch] * (drawn % batch > 0))
        for step, (size, right) in enumerate(zip(sizes, wanted, strict=False)):
            if size == right:
                continue
            raise Wrong(f"{when}: rank {rank}, step {step}: it trains on "
                        f"{counted(size, 'sample')}; with --batch {batch} it should be {right}",
                        "options.batch is the number of samples that a rank has in a step: the "
                        "loader gets it as batch_size.", code="wrong_batch")


def judge_seeds(*runs: tuple[Run, torch.Tensor, int]) -> None:
    """Raises Wrong where two runs, each (run, samples' tokens, seed), have drawn their samples in
    the same order: the seed of the job is the shuffle's."""
    orders = [[indices(run, rank, rows) for rank in range(run.ranks)] for run, rows, _ in runs]
    if orders[0] == orders[1]:
        raise Wrong(f"with --seed {runs[0][2]} and with --seed {runs[1][2]} the samples are drawn "
                    "in the same order", "options.seed goes to the sampler, too: "
                    "DistributedSampler(windows, seed=options.seed).", code="seed_ignored")
