"""One rank of an FSDP2 job on up to 1024 ranks: dry runs beside what `labs.predictions` says."""

import functools

import torch

from labs.checks.verdicts import print_in_script
from labs.pictures.memory import memory_columns
from labs.pictures.picture import Picture
from labs.pictures.plan_memory import GPUS
from labs.predictions import hardware
from labs.predictions.dryrun import dry_run
from labs.predictions.memory.predict import predict
from labs.training import hf_configs
from labs.training.memory_categories import GB
from labs.words import listed


def show_scaling(model: str = "Llama-3-70B", traced: tuple[int, ...] = (8, 64, 1024),
                 ranks: tuple[int, ...] = tuple(2**power for power in range(3, 11)),
                 batch: int = 1, sequence: int = 4096) -> Picture:
    """One rank of an FSDP2 job (bf16 policy, AdamW, full checkpointing) at its peak, by number of
    ranks: full columns from dry runs on `traced` ranks, pale ones predicted; the prediction is the
    tick on the full ones. batch: sequences per rank; sequence: tokens."""
    config = hf_configs.config(model)
    runs = _dry_runs(config, traced, batch, sequence)
    predicted = {count: predict(config, batch=batch, sequence=sequence, ranks=count, device="cuda",
                                strategy="fsdp2", recipe="bf16 policy",
                                checkpointing="full")["peak"]
                 for count in sorted({*ranks, *traced})}
    return print_in_script(memory_columns(
        {f"{count}": run.peak for count, run in runs.items()},
        {f"{count}": held for count, held in predicted.items()},
        f"of tensors on one rank of {model} at its peak", _large(), unit="GB",
        below="ranks (FSDP2)", source="dry run", note=_note(runs, predicted), lesson=(
            f"From {min(predicted)} to {max(predicted):,} ranks: "
            f"{predicted[min(predicted)].total / GB:.0f} to "
            f"{predicted[max(predicted)].total / GB:.2g} GB of a rank")))


def _large() -> list[tuple[float, str]]:
    """(bytes, name) of the GPUs that hold a rank of a large model."""
    gpus = map(hardware.gpu, GPUS)
    return [(gpu.usable, gpu.name) for gpu in gpus if gpu.usable > 30 * GB]


def _dry_runs(config, traced, batch, sequence) -> dict:
    # On a GPU, AdamW treats all parameters at once (torch.optim, foreach), and its temporaries are
    # as large as they are; on fake CPU tensors it does so only when asked.
    adamw = functools.partial(torch.optim.AdamW, foreach=True)
    try:
        return {count: dry_run(config, ranks=count, strategy="fsdp2", batch=batch,
                               sequence=sequence, precision="mixed", checkpointing="full",
                               optimizer=adamw, threads=1, backend="nccl") for count in traced}
    except KeyboardInterrupt:  # a new one, without pages of torch's own lines
        raise KeyboardInterrupt("interrupted; the dry run was given up") from None


def _note(runs, predicted) -> str:
    """How many ranks and layers were traced, and how far the prediction is from the dry runs."""
    off = max(abs(predicted[count].total / run.peak.total - 1) for count, run in runs.items())
    distance = f"{100 * off:.2f} % off at most" if off >= 1e-4 else "less than 0.01 % off"
    one = next(iter(runs.values()))
    return (f"Dry run on {listed(runs)} ranks: {one.traced} of {one.layers} layers with fake "
            f"tensors, {sum(run.seconds for run in runs.values()):.0f} s in one process. The "
            f"pale columns and the ticks are predicted, {distance}."
            f"{_other_explained(predicted.values())}")


def _other_explained(peaks) -> str:
    """What the grey part is, where it is a twentieth of any column or more."""
    if all(held.other < 0.05 * held.total for held in peaks):
        return ""
    return " Other: AdamW's temporaries, which it allocates for all parameters at once."
