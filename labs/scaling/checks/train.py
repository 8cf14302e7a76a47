"""Check of exercise 6.1: train.py, started on ranks as torchrun does it."""

from dataclasses import dataclass

import torch

from labs.exercises.scripts import forked
from labs.exercises.scripts.files import waits_for
from labs.exercises.verdicts import Wrong, check
from labs.scaling.checks import drawn_samples, script_runs, train_report, train_updates
from labs.scaling.runs.expected import CONTEXT
from labs.training import data
from labs.words import counted
from labs.workers import devices
from labs.workers.progress import status

EPOCHS, BATCH, HIDDEN = 2, 3, 16  # the batch is not train.py's own default
# Samples: 2 ranks draw 4 batches of 3 an epoch. 28 do not divide by 3 ranks, and without a sampler
# that repeats or drops some, one rank has a batch more than the others.
EVEN, UNEVEN = 24, 28
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "Default process group has not been initialized": "join_group() comes before the model is "
                                                      "wrapped.",
    "mixed torch.Tensor and DTensor": "fully_shard changes the parameters: make the optimizer from "
                                      "the wrapped module's.",
    "does not require grad": "loss.backward() needs the loss of the model's forward, not of "
                             "loss.item().",
    "is not JSON serializable": "Of a tensor with one number, .item() is the number.",
    "default process group twice": "join_group() has made the process group.",
    "cannot access local variable": "Is the name set on every way to this line, with --strategy "
                                    "ddp and with fsdp?"}


@dataclass(frozen=True)
class Case:
    """A run of train.py. hosts: as many its ranks believe in."""

    what: str
    ranks: int
    samples: int
    strategy: str = "ddp"
    layers: int = 1
    seed: int = 3
    hosts: int = 1

    @property
    def numbers(self) -> dict[str, int]:
        """The options that are numbers."""
        return {"samples": self.samples, "epochs": EPOCHS, "batch": BATCH, "layers": self.layers,
                "hidden": HIDDEN, "seed": self.seed}

    def run(self, script: str, failing_rank: int | None = None) -> forked.Run:
        """Runs the script on its ranks."""
        # a host's ranks would take the same GPU, by their LOCAL_RANK, as another host's
        hosts = 1 if devices.gpus() else self.hosts
        return forked.run(script, (*forked.options(self.numbers), "--strategy", self.strategy),
                          self.ranks, failing_rank, hosts=hosts)

    def rows(self) -> torch.Tensor:
        """The tokens of its samples."""
        return data.windows(self.samples, CONTEXT, self.seed)[:, :-1]


ON_2, ON_3 = Case("2 ranks", 2, EVEN), Case("3 ranks", 3, UNEVEN)
# Another seed, and a LOCAL_RANK of 0 on both ranks; in two blocks, one left out shows.
WITH_FSDP = Case("2 hosts of 1 rank, --strategy fsdp", 2, EVEN, "fsdp", layers=2, seed=5, hosts=2)


@check("6.1", _HINTS)
def check_train(script: str = "train.py"):
    """On 2 ranks, on 3 with samples that do not divide, and with FSDP, train.py must draw each
    sample once an epoch in another order each time, and train as one process does on all ranks'
    batches together; rank 0 alone reports what all did; where a rank raises, the job must fail."""
    if waits := waits_for("6.1", script):
        return waits
    runs = {}
    for case in (ON_2, ON_3, WITH_FSDP):
        with status(case.what):
            runs[case] = case.run(script)
            _judge(runs[case], case)
    _judge_seeds(runs)
    with status("2 ranks, of which one fails"):
        script_runs.judge_failure(ON_2.run(script, script_runs.FAILING_RANK))
    return ("on 2 and 3 ranks each sample is drawn once an epoch, in another order each time; "
            "losses, learning rates and parameters are the reference's, with DDP and with FSDP; "
            "when a rank fails, the job fails")


def _judge(run, case):
    when = f"{case.what}, {case.samples} samples"
    script_runs.judge_end(run, when)
    drawn_samples.judge(run, when, case.rows(), EPOCHS, BATCH)
    _judge_batches(run, when)
    train_updates.judge(run, when, case.numbers, case.strategy)
    script_runs.judge_rank_0(run, when, ("loss", "learning_rate", "tokens", "seconds"))
    train_report.judge(run, when)


def _judge_batches(run, when):
    """--batch is a rank's: with another one, the number of steps and the gradients are others."""
    for rank, record in enumerate(run.records):
        sizes = [sum(len(batch.rows) for batch in step.batches) for step in record.steps]
        drawn = sum(sizes) // EPOCHS
        wanted = EPOCHS * ([BATCH] * (drawn // BATCH) + [drawn % BATCH] * (drawn % BATCH > 0))
        for step, (size, right) in enumerate(zip(sizes, wanted, strict=False)):
            if size == right:
                continue
            raise Wrong(f"{when}: rank {rank}, step {step}: it trains on "
                        f"{counted(size, 'sample')}; with --batch {BATCH} it should be {right}",
                        "options.batch is the number of samples that a rank has in a step: the "
                        "loader gets it as batch_size.", code="wrong_batch")


def _judge_seeds(runs):
    """The seed of the job is the shuffle's: without it, every job has the same order."""
    one, other = ON_2, WITH_FSDP
    orders = [[drawn_samples.indices(runs[case], rank, case.rows()) for rank in range(case.ranks)]
              for case in (one, other)]
    if orders[0] == orders[1]:
        raise Wrong(f"with --seed {one.seed} and with --seed {other.seed} the samples are drawn in "
                    "the same order", "options.seed goes to the sampler, too: "
                    "DistributedSampler(windows, seed=options.seed).", code="seed_ignored")
