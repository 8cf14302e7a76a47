"""Check of exercise 6.15: job.py, written from nothing, on ranks as torchrun starts them."""

import torch

from labs.exercises.scripts import forked
from labs.exercises.scripts.files import waits_for
from labs.exercises.verdicts import Wrong, check
from labs.scaling.checks import drawn_samples, job_shards, job_updates, script_runs
from labs.scaling.runs.expected_job import Drawn, train_job_on
from labs.scaling.runs.ragged import answer_samples
from labs.workers.launcher import launch
from labs.workers.progress import status

SAMPLES, EPOCHS = 24, 2
MODEL = {"layers": 2, "hidden": 16, "seed": 3}
# Gradients have norms of 1 to 4 here: every step is clipped on 2 ranks, none on 4.
ON_2 = {"batch": 2, "accumulate": 2, "replicas": 1, "clip": 0.5}
ON_4 = {"batch": 1, "accumulate": 3, "replicas": 2, "clip": 100.0}
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "Default process group has not been initialized": "dist.init_process_group() comes before the "
                                                      "mesh, the sampler and fully_shard.",
    "unrecognized arguments": "The table above the exercise lists all options.",
    "has no attribute 'full_tensor'": "The norm of sharded gradients is a DTensor. Have the "
                                      "parameters gradients when it is computed, and shards?",
    "PREMUL_SUM": "gloo cannot multiply while it sums: multiply the loss by the number of ranks.",
    "mixed torch.Tensor and DTensor": "fully_shard changes the parameters: make the optimizer from "
                                      "the sharded module's. The norm of sharded gradients is a "
                                      "DTensor too: .full_tensor() is the number."}


@check("6.15", _HINTS)
def check_job(script: str = "job.py"):
    """With FSDP on 2 ranks and HSDP on 2 × 2, job.py must hold shards alone, draw each sample once
    an epoch, and give the optimizer the gradients that one process has on all micro-batches of all
    ranks, clipped by the norm of all of them; where a rank raises, the job must fail."""
    if waits := waits_for("6.15", script):
        return waits
    for what, numbers, ranks in (("2 ranks", ON_2, 2), ("4 ranks, --replicas 2", ON_4, 4)):
        with status(what):
            _judge(_run(script, numbers, ranks), what, numbers)
    with status("2 ranks, of which one fails"):
        script_runs.judge_failure(_run(script, ON_2, 2, script_runs.FAILING_RANK))
    return ("a rank of 2 holds half of the parameters, and so does one of 2 × 2; each sample is "
            "drawn once an epoch; losses, norms and clipped gradients are the reference's in every "
            "step; when a rank fails, the job fails")


def _run(script, numbers, ranks, failing_rank=None) -> forked.Run:
    given = {"samples": SAMPLES, "epochs": EPOCHS, **MODEL, **numbers}
    return forked.run(script, forked.options(given), ranks, failing_rank)


def _judge(run, when, numbers):
    script_runs.judge_end(run, when)
    rows = torch.stack([sample["input_ids"] for sample in answer_samples(SAMPLES, MODEL["seed"])])
    drawn_samples.judge(run, when, rows, EPOCHS, numbers["batch"])
    _judge_parts(run, when, numbers)
    of_ranks = [drawn_samples.indices(run, rank, rows) for rank in range(run.ranks)]
    drawn: Drawn = [list(parts) for parts in zip(*of_ranks, strict=True)]
    [expected] = launch(train_job_on, drawn, SAMPLES, *MODEL.values(), numbers["clip"], ranks=1,
                        quiet=True)
    job_shards.judge(run, when, expected.nbytes, numbers["replicas"])
    job_updates.judge(run, when, expected, numbers["clip"])
    script_runs.judge_rank_0(run, when, ("loss", "tokens", "norm"))
    job_updates.judge_metrics(run, when, expected, numbers)


def _judge_parts(run, when, numbers):
    """Several micro-batches make one step: with a step after each, the batch is another one."""
    for rank, record in enumerate(run.records):
        for number, step in enumerate(record.steps):
            sizes = [len(batch.rows) for batch in step.batches]
            if sizes != [numbers["batch"]] * numbers["accumulate"]:
                raise Wrong(f"{when}: rank {rank}, step {number}: the micro-batches before the "
                            f"optimizer's step have {sizes} samples; --accumulate "
                            f"{numbers['accumulate']} --batch {numbers['batch']} asks for "
                            f"{[numbers['batch']] * numbers['accumulate']}",
                            "The gradients of several backward passes add up until the optimizer "
                            "steps.", code="wrong_batch")
