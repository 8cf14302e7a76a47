"""Exercise 4.13: fsdp.py, started on ranks as torchrun does it: its units, types, recomputed blocks
and updates, and what another number of ranks makes of its checkpoint."""

import argparse
from pathlib import Path

import torch

from labs.checks.scripts import drawn_samples, forked, run_end, updates
from labs.checks.scripts.expected_training import CONTEXT
from labs.checks.scripts.files import waits_for
from labs.checks.verdicts import Wrong, check
from labs.words import counted, listed
from labs.workers import processes
from labs.workers.programs import FAILING_RANK
from labs.workers.progress import status

# Two blocks: one that is left out shows. 22: a rank of 2 has batches of 3, 3, 3 and 2 samples.
EPOCHS, BATCH, SAMPLES, LAYERS = 2, 3, 22, 2
NUMBERS = {"samples": SAMPLES, "batch": BATCH, "layers": LAYERS, "hidden": 16, "seed": 3}
# What another state than the saved one leads to.
_NOT_LOADED = ("differs_from_reference", "wrong_loss", "other_model", "wrong_gradient")
_SHARD = "fully_shard(block) for each block of model.transformer.h, then fully_shard(model)."
_HINTS = {
    "is not defined": "Is each name that you use made above its use, or imported?",
    "mixed torch.Tensor and DTensor": "The optimizer is made from the sharded module's parameters: "
                                      "is each of them in a unit, and the root one too?",
    "Missing key in checkpoint": "save and load need the same names: a dictionary for the model, "
                                 "one for the optimizer, and the epochs.",
    "CheckpointException": "dcp.load fills a dictionary like the one that was saved: the same "
                           "names, and tensors of the same shapes."}


@check("4.13", _HINTS)
def check_fsdp(script: str = "fsdp.py"):
    """On 2 ranks fsdp.py must shard block by block and train as one process does; on 3 ranks it
    must continue from the checkpoint; with --bf16 gather in bf16 and reduce in fp32; with
    --recompute run each block twice; where a rank raises, the job must fail."""
    if waits := waits_for("4.13", script):
        return waits
    with processes.temporary_folder() as folder:
        first = _judged(script, "2 ranks", 2, folder, "trained", EPOCHS)
        _judge_blocks(first, "2 ranks", 1)
        # Under another name, and with a learning rate that is not the saved one: what is not in
        # the checkpoint, or not loaded, shows.
        Path(folder, "moved").mkdir()
        saved = Path(folder, "trained", f"epoch_{EPOCHS}").rename(Path(folder, "moved", "epoch_1"))
        resumed = _judged(script, "3 ranks, --resume", 3, folder, "resumed", 2 * EPOCHS,
                          "--resume", str(saved), "--lr", "5e-4", before=first)
        _judge_blocks(resumed, "3 ranks, --resume", 1)
        recomputed = _run(script, "2 ranks, --recompute", 2, folder, "recompute", EPOCHS,
                          "--recompute")
        updates.judge(recomputed, "2 ranks, --recompute", NUMBERS, "fsdp", falling=False)
        _judge_blocks(recomputed, "2 ranks, --recompute", 2)
        _judge_types(_run(script, "2 ranks, --bf16", 2, folder, "bf16", EPOCHS, "--bf16"),
                     first, "2 ranks, --bf16")
        with status("2 ranks, of which one fails"):
            run_end.judge_failure(forked.run(
                script, _arguments(folder, "failed", EPOCHS), 2, FAILING_RANK, option=None,
                shared=folder))
    return ("each block is a unit, and so is the rest; 2 ranks train as one process does, and 3 go "
            "on from their checkpoint; bf16 is gathered and fp32 reduced; blocks are recomputed; "
            "when a rank fails, the job fails")


def _arguments(folder, name, epochs, *more) -> tuple[str, ...]:
    return (*forked.options({**NUMBERS, "epochs": epochs}), "--checkpoints", f"{folder}/{name}",
            *more)


def _run(script, what, ranks, folder, name, epochs, *more) -> forked.Run:
    with status(what):
        run = forked.run(script, _arguments(folder, name, epochs, *more), ranks, option=None,
                         shared=folder)
    run_end.judge_end(run, what)
    run_end.judge_speaker(run, what)
    return run


def _judged(script, what, ranks, folder, name, epochs, *more, before=None) -> forked.Run:
    run = _run(script, what, ranks, folder, name, epochs, *more)
    # Invariant: a job that goes on begins with the epoch after the last one that was saved.
    steps, wanted = len(run.records[0].steps), EPOCHS * -(-SAMPLES // (BATCH * ranks))
    if steps != wanted:
        raise Wrong(f"{what}, --epochs {epochs}: {counted(steps, 'optimizer step')}; "
                    f"{EPOCHS} epochs have {wanted}" + " after those that are done" * bool(before),
                    "The epochs that are done are saved with the parameters, and load returns them."
                    if before else "The last batch of an epoch is shorter, and it is a step, too.",
                    code="wrong_count")
    drawn_samples.judge(run, what, _rows(), EPOCHS, BATCH)
    if before:
        _judge_rate(run, what, before.records[0].steps[-1].learning_rate)
    try:
        updates.judge(run, what, NUMBERS, "fsdp", falling=False,
                      before=before and updates.drawn_by(before))
    except Wrong as wrong:
        if not before or wrong.code not in _NOT_LOADED:
            raise
        hint = ("The loop is the one that trained right before: has load filled the parameters "
                "and the optimizer's moments?")
        raise Wrong(wrong.sentence, hint, code="not_loaded") from None
    return run


def _judge_rate(run, what, saved):
    """The optimizer's state has its learning rate, too."""
    found = run.records[0].steps[0].learning_rate
    if found != saved:
        raise Wrong(f"{what}: the first step is taken with a learning rate of {found:g}, that of "
                    f"--lr; {saved:g} was saved", "dcp.load fills tensors in place, but it "
                    "replaces numbers in the dictionary: set_state_dict gives the optimizer both.",
                    code="wrong_rate")


def _rows() -> torch.Tensor:
    """The tokens of the samples, (samples, CONTEXT), as the script cuts them."""
    text = Path(argparse.__file__).read_bytes()[:SAMPLES * CONTEXT]
    return torch.tensor(list(text)).view(SAMPLES, CONTEXT)


def _judge_blocks(run, when, times):
    """Under checkpointing a block runs in forward, and once more in backward."""
    for rank, record in enumerate(run.records):
        wanted = times * LAYERS * len(record.steps)
        if record.blocks != wanted:
            often = record.blocks / (LAYERS * len(record.steps))
            raise Wrong(f"{when}: rank {rank}: a block ran {often:g} times a step, not {times}",
                        "checkpoint_wrapper(block) returns a new module: put it into the model's "
                        "list, where options.recompute is set and only there.",
                        code="not_recomputed" if record.blocks < wanted else "recomputed")


def _judge_types(run, like, when):
    """like: the run in fp32."""
    run_bytes, fp32_bytes = (max(nbytes for nbytes, _ in each.records[0].gathered)
                             for each in (run, like))
    if run_bytes > 0.6 * fp32_bytes:
        raise Wrong(f"{when}: {run_bytes:,} bytes are gathered for the largest unit, in fp32 "
                    f"{fp32_bytes:,}", "param_dtype=torch.bfloat16 of each unit's mp_policy: the "
                    "root's, too.", code="not_bf16")
    types = {dtype for record in run.records for _, dtype in record.scattered}
    if types != {"float32"}:
        raise Wrong(f"{when}: gradients are reduced in {listed(sorted(types))}",
                    "reduce_dtype=torch.float32: sums over the ranks keep their digits.",
                    code="wrong_dtype")
    if any(parameter.dtype != torch.float32 for record in run.records
           for parameter in record.parameters.values()):
        raise Wrong(f"{when}: the shards are not fp32: updates are lost where they are small "
                    "against a parameter", "MixedPrecisionPolicy casts what is gathered, and leaves"
                    " the shards: the model itself stays in fp32.", code="shards_not_fp32")
