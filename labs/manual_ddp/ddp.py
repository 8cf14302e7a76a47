"""Exercise 2.12: ddp.py, started on ranks as torchrun does it: its samples, its updates, and what
it saves."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from labs.checks.scripts import drawn_samples, forked, run_end, updates
from labs.checks.scripts.expected_training import CONTEXT
from labs.checks.scripts.files import waits_for
from labs.checks.verdicts import Wrong, check
from labs.training import models
from labs.words import listed
from labs.workers import devices
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

EPOCHS, BATCH, LAYERS, HIDDEN = 2, 3, 1, 16  # none is ddp.py's own default
# Samples: each of 2 ranks draws batches of 3, 3, 3 and 2. 28 do not divide by 3 ranks, and without
# a sampler that repeats or drops some, one rank has a batch more than the others.
EVEN, UNEVEN = 22, 28
_SETUP = "dist.init_process_group() comes before the sampler and the wrapper."
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "Default process group has not been initialized": _SETUP,
    "default process group twice": "setup() alone makes the process group.",
    "DistributedDataParallel' object has no attribute": "The model itself is module.module.",
    "does not require grad": "backward needs the loss of the wrapped module's forward, not of "
                             "loss.item().",
    "Expected input batch_size": "Each token predicts the next one: logits without the last place, "
                                 "tokens without the first."}


@dataclass(frozen=True)
class Case:
    """A run of ddp.py. hosts: as many its ranks believe in."""

    what: str
    ranks: int
    samples: int
    seed: int
    hosts: int = 1

    @property
    def numbers(self) -> dict[str, int]:
        """The options that are numbers."""
        return {"samples": self.samples, "epochs": EPOCHS, "batch": BATCH, "layers": LAYERS,
                "hidden": HIDDEN, "seed": self.seed}

    @property
    def rows(self) -> torch.Tensor:
        """The tokens of its samples, (samples, CONTEXT), as the script cuts them."""
        text = Path(argparse.__file__).read_bytes()[:self.samples * CONTEXT]
        return torch.tensor(list(text)).view(self.samples, CONTEXT)

    def run(self, script: str, failing_rank: int | None = None) -> forked.Run:
        """Runs the script on its ranks."""
        # a host's ranks would take the same GPU, by their LOCAL_RANK, as another host's
        hosts = 1 if devices.gpus() else self.hosts
        return forked.run(script, forked.options(self.numbers), self.ranks, failing_rank,
                          hosts=hosts, option=forked.CHECKPOINT)


ON_2, ON_3 = Case("2 ranks", 2, EVEN, seed=3), Case("3 hosts of 1 rank", 3, UNEVEN, 3, hosts=3)
OTHER_SEED = Case("2 ranks, another seed", 2, EVEN, seed=5)


@check("2.12", _HINTS)
def check_ddp(script: str = "ddp.py"):
    """On 2 ranks, and on 3 with samples that do not divide, ddp.py must draw each sample once an
    epoch in another order each time, and train as one process does on all ranks' batches together;
    rank 0 alone prints and saves the model; where a rank raises, the job must fail."""
    if waits := waits_for("2.12", script):
        return waits
    runs = {}
    for case in (ON_2, ON_3, OTHER_SEED):
        with status(case.what):
            runs[case] = case.run(script)
            _judge(runs[case], case)
    drawn_samples.judge_seeds(*((runs[case], case.rows, case.seed)
                                for case in (ON_2, OTHER_SEED)))
    with status("2 ranks, of which one fails"):
        run_end.judge_failure(ON_2.run(script, FAILING_RANK))
    return ("on 2 and 3 ranks each sample is drawn once an epoch, in another order each time; "
            "gradients and parameters are those of one process; the file is a GPT-2's; when a rank "
            "fails, the job fails")


def _judge(run, case):
    when = f"{case.what}, {case.samples} samples"
    run_end.judge_end(run, when)
    drawn_samples.judge(run, when, case.rows, EPOCHS, BATCH)
    drawn_samples.judge_batches(run, when, EPOCHS, BATCH)
    updates.judge(run, when, case.numbers, falling=False)
    run_end.judge_writer(run, when)
    _judge_saved(run, when)
    if not run_end.printed(run.output[0]):
        raise Wrong(f"{when}: rank 0 printed nothing", "Somebody who watches the job wants to see "
                    "the loss, at least once an epoch.", code="nothing_printed")


def _judge_saved(run, when):
    """The file must load without a process group: a model without a wrapper loads it."""
    saved, own = run.metrics, models.gpt2(LAYERS, HIDDEN, context=CONTEXT)
    if not isinstance(saved, dict) or not all(
            isinstance(value, torch.Tensor) for value in saved.values()):
        raise Wrong(f"{when}: the file of --checkpoint is not a state dict of tensors",
                    "torch.save(module.module.state_dict(), options.checkpoint)",
                    code="unreadable_file")
    names = own.state_dict().keys()
    # Invariant: the names are the model's. Catches the wrapper's own state dict, whose names all
    # begin with "module.".
    if saved.keys() != names:
        others = sorted(saved.keys() - names)[:2] or sorted(names - saved.keys())[:2]
        raise Wrong(f"{when}: a GPT-2 cannot load the file of --checkpoint, in which names differ: "
                    f"{listed(list(map(repr, others)))}", "DistributedDataParallel keeps the model "
                    "in its attribute `module`, and puts that word before each name.",
                    code="wrong_keys")
    last = run.records[0].parameters
    for name, value in last.items():
        if not torch.equal(saved[name], value):
            raise Wrong(f"{when}: {name!r} in the file of --checkpoint is not what training ended "
                        "with", "Save when all epochs are done.", code="saved_too_early")
