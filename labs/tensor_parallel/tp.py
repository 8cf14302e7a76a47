"""Exercise 7.28: tp.py, started on ranks as torchrun does it: who draws which samples, what a rank
holds, and whether the model that it saves is the one that one process trains."""

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from labs.checks.scripts import drawn_samples, forked, run_end
from labs.checks.scripts.expected_training import CONTEXT, train_on
from labs.checks.scripts.files import waits_for
from labs.checks.scripts.updates import WAY, drawn_by
from labs.checks.verdicts import Wrong, check
from labs.training import models
from labs.words import listed
from labs.workers.launcher import launch
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

EPOCHS, BATCH, LAYERS, HIDDEN = 2, 2, 2, 32  # two layers: one that is left out shows
MORE = 1.1  # times an equal part of the parameters: norms are whole, shards are padded
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "mixed torch.Tensor and DTensor": "A module whose weight is a DTensor gets a plain tensor: "
                                      "input_layouts of its style say how the tensor lies.",
    "size mismatch": "A matrix cut by columns returns its own columns alone: the one that follows "
                     "is cut by rows. The logits are not sharded: output_layouts=Replicate().",
    "shapes cannot be multiplied": "A matrix cut by columns returns its own columns alone: the one "
                                   "that follows is cut by rows.",
    "out of range": "The embedding is cut by rows, and its input is replicated: "
                    "input_layouts=Replicate()."}


@dataclass(frozen=True)
class Case:
    """A run of tp.py on ranks of which `tensor` at a time share a replica."""

    ranks: int
    tensor: int
    samples: int
    seed: int

    def run(self, script: str, failing_rank: int | None = None) -> forked.Run:
        """Runs the script on its ranks."""
        numbers = {"tensor": self.tensor, "samples": self.samples, "epochs": EPOCHS,
                   "batch": BATCH, "layers": LAYERS, "hidden": HIDDEN, "seed": self.seed}
        return forked.run(script, forked.options(numbers), self.ranks, failing_rank,
                          option=forked.CHECKPOINT)

    @property
    def rows(self) -> torch.Tensor:
        """The tokens of its samples, (samples, CONTEXT), as the script cuts them."""
        text = Path(argparse.__file__).read_bytes()[:self.samples * CONTEXT]
        return torch.tensor(list(text)).view(self.samples, CONTEXT)

    @property
    def make_model(self) -> partial:
        """Makes the script's model."""
        return partial(models.llama, LAYERS, HIDDEN, heads=8, kv_heads=4, context=CONTEXT,
                       intermediate=4 * HIDDEN, seed=self.seed)


# In each case a replica's last batch is shorter.
CASES = (Case(2, 2, samples=7, seed=3), Case(4, 2, samples=14, seed=5))


@check("7.28", _HINTS)
def check_tp(script: str = "tp.py"):
    """On one replica of 2 ranks and on two, tp.py must give a replica's ranks the same samples and
    replicas different ones, leave each rank about an equal part of the parameters, and save the
    model that one process trains; where a rank raises, the job must fail."""
    if waits := waits_for("7.28", script):
        return waits
    for case in CASES:
        with status(f"{case.ranks} ranks, --tensor {case.tensor}"):
            _judge(case.run(script), case)
    with status("2 ranks, of which one fails"):
        run_end.judge_failure(CASES[0].run(script, FAILING_RANK))
    return ("one replica of 2 ranks and two of them train as one process does; a rank holds its "
            "part of every matrix; when a rank fails, the job fails")


def _judge(run, case):
    when = f"{case.ranks} ranks, --tensor {case.tensor}"
    run_end.judge_end(run, when)
    _judge_groups(run, when, case)
    first = replace(run, records=run.records[::case.tensor], ranks=case.ranks // case.tensor)
    drawn_samples.judge(first, when, case.rows, EPOCHS, BATCH)
    drawn_samples.judge_batches(first, when, EPOCHS, BATCH)
    [expected] = launch(train_on, drawn_by(first), case.make_model, False, ranks=1, quiet=True)
    _judge_held(run, when, expected)
    run_end.judge_writer(run, when)
    _judge_saved(run, when, expected)


def _judge_groups(run, when, case):
    """The ranks of a replica compute one model's forward together: on the same samples."""
    drawn = [[index for step in drawn_samples.indices(run, rank, case.rows) for part in step
              for index in part] for rank in range(run.ranks)]
    for rank in range(run.ranks):
        first = rank - rank % case.tensor
        if drawn[rank] != drawn[first]:
            raise Wrong(f"{when}: ranks {first} and {rank} are one replica, and draw different "
                        "samples", "DistributedSampler(samples, num_replicas, rank) counts "
                        'replicas: mesh["data"].size() and mesh["data"].get_local_rank().',
                        code="group_draws_differ")


def _judge_held(run, when, expected):
    whole = sum(tensor.nbytes for tensor in expected.initial.values())
    norms = sum(tensor.nbytes for tensor in expected.initial.values() if tensor.dim() == 1)
    most = MORE * ((whole - norms) / run.ranks + norms)
    for rank, record in enumerate(run.records):
        held = max(step.held for step in record.steps)
        if held > most:
            raise Wrong(f"{when}: rank {rank} holds {held:,} bytes of parameters; an equal part of "
                        f"the matrices, and full norms, are {most / MORE:,.0f}",
                        'Embedding, seven projections of each layer and the head are cut over '
                        'mesh["tensor"]; each layer and the model are sharded over mesh["data"].',
                        code="not_sharded")


def _judge_saved(run, when, expected):
    saved = run.metrics
    if not isinstance(saved, dict) or any(isinstance(each, DTensor) for each in saved.values()):
        raise Wrong(f"{when}: the file of --checkpoint is no state dict of full tensors",
                    "get_model_state_dict gathers it on all ranks; rank 0 saves it.",
                    code="unreadable_file")
    others = sorted(saved.keys() ^ expected.parameters.keys())
    if others:
        raise Wrong(f"{when}: the file of --checkpoint and a Llama differ in {listed(others[:2])}",
                    "The names are the model's.", code="wrong_keys")

    def norm(tensors):
        return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))

    away = {name: saved[name] - want for name, want in expected.parameters.items()}
    way = norm(expected.initial[name] - want for name, want in expected.parameters.items())
    if not norm(away.values()) <= WAY * way:
        farthest = max(away, key=lambda name: away[name].norm().item())
        raise Wrong(f"{when}: the saved parameters are {norm(away.values()) / way:.0%} of the way "
                    "that training took away from those of one process, most of all in "
                    f"{farthest!r}", "Forward must be the full model's on each replica, and "
                    "gradients the mean over the replicas.", code="differs_from_reference")
