"""A 70B model on 8 to 1024 ranks, in one process: some numbers of ranks by dry run, all by formula.
"""

import functools

import torch

from labs.exercises.verdicts import print_in_script
from labs.pictures.memory import memory_columns
from labs.pictures.picture import Picture
from labs.predictions import hardware
from labs.predictions.dryrun import dry_run
from labs.predictions.memory import predict
from labs.training import hf_configs

RANKS = tuple(2**power for power in range(3, 11))
TRACED = (8, 64, 1024)
GPUS = ("A100-40", "A100-80", "H100", "H200")


def show_scaling(model: str = "Llama-3-70B", traced: tuple = TRACED, ranks: tuple = RANKS,
                 batch: int = 1, sequence: int = 4096) -> Picture:
    """One rank of an FSDP2 job (bf16 policy, AdamW, full checkpointing) at its peak, against the
    number of ranks: full columns from dry runs, pale ones from the closed form, which is the tick
    on the full ones. batch: sequences per rank; sequence: tokens."""
    config = hf_configs.config(model)
    runs = _dry_runs(config, traced, batch, sequence)
    formula = {count: predict(config, batch=batch, sequence=sequence, ranks=count, device="cuda",
                              strategy="fsdp2", recipe="bf16 policy", checkpointing="full")["peak"]
               for count in sorted({*ranks, *traced})}
    capacities = [(hardware.gpu(name).usable, name) for name in GPUS]
    return print_in_script(memory_columns(
        {f"{count}": run.peak for count, run in runs.items()},
        {f"{count}": held for count, held in formula.items()},
        f"of tensors on one rank of {model} at its peak", capacities, unit="GB",
        below="ranks (FSDP2)", source="dry run", note=_note(runs, formula)))


def _dry_runs(config, traced, batch, sequence) -> dict:
    try:
        return {count: dry_run(config, ranks=count, strategy="fsdp2", batch=batch,
                               sequence=sequence, precision="mixed", checkpointing="full",
                               optimizer=_adamw_of_a_gpu, threads=1, backend="nccl")
                for count in traced}
    except KeyboardInterrupt:  # without pages of torch's own lines
        raise KeyboardInterrupt("interrupted; the dry run was given up") from None


# On a GPU, AdamW treats all parameters at once (torch.optim, foreach), and its temporaries are as
# large as they are; on fake CPU tensors it has to be told.
_adamw_of_a_gpu = functools.partial(torch.optim.AdamW, foreach=True)


def _note(runs, formula) -> str:
    """What was traced and what was computed, and how far the two are from each other."""
    off = max(abs(formula[count].total / run.peak.total - 1) for count, run in runs.items()) * 100
    far = f"{off:.2f} % off at most" if off >= 0.01 else "less than 0.01 % off"
    one = next(iter(runs.values()))
    return (f"Dry run on {_listed(runs)} ranks: {one.traced} of {one.layers} layers with fake "
            f"tensors, {sum(run.seconds for run in runs.values()):.0f} s in one process. The "
            f"others, pale, and the ticks are the closed form's, {far}.{_other(formula.values())}")


def _other(peaks) -> str:
    """What the grey part is, where there is much of it."""
    if all(held.other < 0.05 * held.total for held in peaks):
        return ""
    return " Other: what AdamW makes for a moment, for all parameters at once."


def _listed(counts) -> str:
    *most, last = map(str, counts)
    return f"{', '.join(most)} and {last}" if most else last
