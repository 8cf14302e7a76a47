"""The charts and tables of whole jobs, estimated and measured: exercises 1.6 and 1.7, drawn with
the student's own functions."""

from bisect import bisect_left

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_numbers
from labs.exercises.verdicts import Wrong, print_in_script, shows
from labs.memory_math import measurements
from labs.memory_math.charts.states import states_of
from labs.memory_math.checks.rank_states import HELD, STEP_COUNTER
from labs.memory_math.explorer import Setting
from labs.memory_math.scaffold import RankMemory
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware, parameters
from labs.predictions.parameters import shape_of
from labs.training import hf_configs
from labs.training.memory_categories import GB, GiB, Memory
from labs.training.presets import Preset
from labs.workers import devices

JOBS = {f"{size}, {stage}": Setting(f"Llama-2-{size}", 4, strategy, "bf16, fp32 moments", 1, 4096,
                                    "full")
        for size in ("7B", "13B")
        for stage, strategy in (("DDP", "DDP"), ("ZeRO-3", "ZeRO-3 = FSDP"))}
GPU = hardware.gpu("A100-80")
NUMBERS = ("memory_allocated", "memory_reserved", "nvidia-smi")
MB = 10**6


@shows("1.6")
def show_bytes_left(bytes_left) -> Table:
    """A table of the GB that the student's function leaves in each job, and of the largest batch
    that fits."""
    rows = []
    for name, setting in JOBS.items():
        left = bytes_left(*_job(setting)) / GB
        rows.append((name, f"{left:,.2f}", "fits" if left >= 0 else "does not fit",
                     _largest_batch(bytes_left, _job(setting)) or "none"))
    return Table(f"4 × {GPU.name}, 1 × 4096 tokens per rank, checkpointing, 12 bytes per parameter",
                 ("", "GB left by your function", "", "largest batch"), rows)


def _job(setting) -> tuple:
    """The setting as arguments of the student's bytes_left."""
    return (shape_of(hf_configs.config(setting.model)), (2, 2, 8),
            0 if setting.strategy == "DDP" else 3, setting.ranks, setting.batch, setting.sequence,
            True, GPU)


def _largest_batch(bytes_left, job) -> int:
    """The largest batch of at most 1024 that leaves 0 bytes or more; 0 where none does."""
    return bisect_left(range(1, 1025), True, key=lambda batch: bytes_left(
        *job[:4], batch, *job[5:]) < 0)


@shows("1.6")
def show_self_check(bytes_left, per_rank, activations) -> Picture:
    """The student's estimate of each job above the prediction that counts every buffer."""
    rows, guess = [], guessed("1.6")
    for name, setting in JOBS.items():
        mine = _estimate(bytes_left, per_rank, activations, _job(setting))
        rows += [MemoryRow(f"{name}, your estimate", predicted=mine,
                           guessed=guess * GB if guess and name == "13B, ZeRO-3" else None),
                 MemoryRow("with every buffer",
                           predicted=setting.held + Memory(other=setting.overhead))]
    return memory_bars(rows, f"of one rank, 4 × {GPU.name}", [(GPU.usable, GPU.name)], unit="GB")


def _estimate(bytes_left, per_rank, activations, job) -> Memory:
    """The student's bytes by category; what is neither states nor activations is `other`."""
    m, recipe, stage, ranks, *sizes, gpu = job
    states = states_of(per_rank(parameters.count(m), recipe, stage, ranks), "per_rank")
    kept = activations(m, *sizes)
    rest = gpu.usable - bytes_left(*job) - states.total - kept
    if rest < 0:
        raise Wrong("bytes_left counts fewer bytes than per_rank and activations together",
                    "Run its check first.", code="wrong_number")
    return states + Memory(activations=kept, other=rest)


@shows("1.7")
def show_rank_states(measured: list[RankMemory], rank_states) -> Picture:
    """What each rank holds after backward, and the student's sum."""
    return memory_bars([MemoryRow(held.name, held.after_backward,
                                  _formula_total(rank_states, held)) for held in measured],
                       "of one rank after backward", unit="MB")


@shows("1.7")
def show_unexplained_bytes(measured: list[RankMemory], rank_states) -> Table:
    """A table of the bytes that the student's numbers do not explain."""
    if measured[0].report.allocator:
        return _unexplained_on_a_gpu(measured, rank_states)
    rows = []
    for held in measured:
        counters = STEP_COUNTER * held.tensors
        over = held.after_backward.total - _formula_total(rank_states, held)
        rows.append((held.name, f"{held.after_backward.total:,}", f"{over:,.0f}",
                     f"{counters:,}", f"{over - counters:,.0f}"))
    return Table("bytes of one rank after backward", (
        "", "measured", "more than your formula", "AdamW's step counters", "not explained"),
        rows, note=f"AdamW keeps one fp32 counter for each of {measured[0].tensors} tensors.")


def _unexplained_on_a_gpu(measured, rank_states) -> Table:
    """There AdamW counts its steps on the CPU, and blocks are larger than their tensors."""
    rows = []
    for held in measured:
        workspaces = held.report.allocator.workspaces
        over = held.after_backward.total - _formula_total(rank_states, held)
        rows.append((held.name, f"{held.after_backward.total:,}", f"{over:,.0f}",
                     f"{workspaces:,}", f"{over - workspaces:,.0f}"))
    return Table("bytes of one rank's GPU after backward", (
        "", "measured", "more than your formula", "cuBLAS's workspaces", "not explained"),
        rows, note="A block of the allocator is a multiple of 512 bytes; above 1 MiB it may be up "
                   f"to 1 MiB larger than its tensor. The model has {measured[0].tensors} tensors.")


@shows("1.7")
def show_peak(measured: list[RankMemory]) -> Picture:
    """The step's peak by category, and the prediction; on a GPU also how far the recorded peak of
    the run is from the allocator's own."""
    guess = guessed("1.7")
    rows = [MemoryRow(held.name, held.report.step_peak, held.predicted["peak"].total,
                      guess * 1e6 if guess and held.strategy == "DDP" else None)
            for held in measured]
    picture = memory_bars(rows, "of one rank at its peak", unit="MB")
    worst = max(abs(row.predicted_total / row.measured.total - 1) for row in rows)
    picture.text += f"\nthe prediction is off by at most {100 * worst:.2g} %"
    for held in measured:
        if held.report.allocator:
            picture.text += f"\n{held.name}: {held.report.allocator}"
    return picture


def _formula_total(rank_states, held) -> float:
    return sum(require_numbers(rank_states(held.count, held.strategy, held.ranks), HELD,
                               held.strategy))


def show_other_memory() -> Table:
    """A table of what the notebook's formulas do not count, and which of three numbers show it."""
    named = {name: f"{size / GiB:.3g} GiB" for name, size in hardware.overheads(ranks=2).items()}
    rows = [("DDP's buckets", "a copy of all gradients", "yes", "yes", "yes"),
            ("gathered parameters", "of one block, for a moment two", "yes", "yes", "yes"),
            ("cuBLAS workspace", named["cuBLAS"], "yes", "yes", "yes"),
            # kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp
            ("rounding", "each tensor to 512 bytes", "yes", "yes", "yes"),
            ("fragmentation", "what the cache keeps and cannot use", "no", "yes", "yes"),
            ("NCCL", named["NCCL"], "no", "no", "yes"),
            ("CUDA context", named["CUDA context"], "no", "no", "yes")]
    return print_in_script(Table(
        "other memory of a GPU, by name",
        ("", "bytes", "memory_allocated", "memory_reserved", "nvidia-smi"), rows, left=1,
        note="Sizes: labs.predictions.hardware, with sources; measured on A100 and H100. "
             "nvidia-smi's number is the largest, and the one that must fit."))


@shows("Three numbers")
def show_gpu_memory(preset: Preset) -> Table:
    """A table of the three numbers at several moments of a rank's life: measured on a GPU, and
    computed for one of the jobs on a machine without."""
    return _measured_numbers(preset) if devices.gpus() else _computed_numbers()


def _measured_numbers(preset) -> Table:
    moments = measurements.measure_gpu_memory(preset)
    rows = [(one.name, *(f"{size / MB:,.1f}" for size in (one.allocated, one.reserved, one.used)))
            for one in moments]
    rounding = max(one.allocated - one.requested for one in moments)
    return Table("MB of rank 0's GPU, measured", ("", *NUMBERS), rows, note=(
        "nvidia-smi's number, here from the driver, counts all programs of this GPU. Blocks of the "
        f"allocator have at most {rounding:,} bytes more than the tensors in them."))


def _computed_numbers() -> Table:
    job = JOBS["13B, ZeRO-3"]
    parts = hardware.overheads(job.ranks)
    tensors = job.held.total + parts["cuBLAS"]
    other = parts["CUDA context"] + parts["NCCL"]
    rows = [("CUDA's context", 0, 0, parts["CUDA context"]), ("NCCL", 0, 0, other),
            ("the step, at its peak", tensors, tensors, tensors + other)]
    return Table(f"MB of one rank, computed: Llama-2-13B, ZeRO-3 on {job.ranks} × {GPU.name}",
                 ("", *NUMBERS),
                 [(name, *(f"{size / MB:,.0f}" for size in sizes)) for name, *sizes in rows],
                 note="This machine has no GPU, and a CPU has none of the three numbers: this is "
                      "computed. Fragmentation makes reserved larger than allocated.")
