"""Exercise 1.7: what is really allocated on each rank."""

import functools

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, require_numbers, require_signature
from labs.checks.verdicts import check, print_in_script, shows
from labs.memory_math import measurements
from labs.memory_math.bytes_left import ANSWERS, GPU
from labs.memory_math.scaffold import STATES, RankMemory, measure_strategies
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.training.memory_categories import GiB
from labs.training.presets import Preset, preset
from labs.workers import cuda, devices

HELD = (*STATES, "buffers")
STEP_COUNTER = 4  # bytes: AdamW counts its steps in one fp32 number for each tensor


@check("1.7")
def check_rank_states(rank_states):
    """Four numbers for plain, DDP and FSDP2, against ranks that really train."""
    require_signature(rank_states, ("count", "strategy", "ranks"))
    for held in rank_memories():
        returned = rank_states(held.count, held.strategy, held.ranks)
        for name, got in zip(HELD, require_numbers(returned, HELD, held.name), strict=True):
            _judge_category(name, got, held)
    if devices.gpus():
        return "what ranks hold after backward, except for what blocks have more than their tensors"
    return ("to the byte what ranks hold after backward, except for AdamW's step counters "
            f"({STEP_COUNTER * held.tensors} bytes)")


def rank_memories() -> list[RankMemory]:
    """What ranks hold that train a small GPT-2 of drawn sizes: plain on one rank, under DDP on 3
    and 2, under FSDP2 on 4 and 2. On the check's device: the CPU is exact and quick. Measured once
    in a process."""
    return _rank_memories(devices.gpus())


@functools.cache
def _rank_memories(gpus) -> list[RankMemory]:
    rng = new_generator()
    # Always as many layers, and so tensors: the verdict says the bytes of their step counters.
    small = preset("laptop", ranks=1, layers=2, hidden=8 * rng.randint(3, 6), heads=4,
                   context=4 * rng.randint(3, 6), batch=2)
    # 2 ranks come last: there a half may be a rank's share, 16 bits, or N/2 copies. All sizes
    # divide by 4.
    jobs = ((("plain",), 1), (("DDP",), 3), (("FSDP2",), 4), (("DDP", "FSDP2"), 2))
    return [held for strategies, ranks in jobs
            for held in measure_strategies(strategies, small, ranks)]


def _judge_category(name, got, held):
    real = held.after_backward.by_name()[name]
    # Two things are not the student's to count: AdamW's step counters, which are state, and the few
    # bytes that DDP or FSDP2 keep in addition to their buckets. And a GPU's blocks are larger than
    # the tensors in them: two moments, so two tensors for each of the model's.
    spare = {"optimizer state": STEP_COUNTER * held.tensors,
             "buffers": 0.02 * 4 * held.count}.get(name, 0)
    spare += 2 * cuda.BLOCK * held.tensors if devices.gpus() else 0
    if abs(got - real) <= spare and (name != "optimizer state" or got <= real):
        return
    judge_number(got, real, _causes(name, held), f"{held.name}, {name}", "bytes",
                 "fp32 and AdamW: 4 + 4 + 8 bytes per parameter; which are sharded?",
                 source="a rank holds")


def _causes(name, held) -> list[Cause]:
    count, ranks, sharded = held.count, held.ranks, held.strategy == "FSDP2"
    buffers, state = name == "buffers", name == "optimizer state"
    # Bytes, unsharded: two moments, or one fp32 number, for each parameter.
    whole = count * (8 if state else 4)
    return [
        Cause("nothing_counted", 0, "there are some", {
                  "buffers": "DDP copies all gradients into its buckets.",
                  "optimizer state": "AdamW keeps two moments.",
                  "gradients": "Backward leaves one number for each parameter."}.get(name, "")),
        Cause("no_such_copy", whole, "there is no such copy here" if buffers else "not sharded",
              "FSDP shards parameters, gradients and optimizer state; only DDP has buckets."),
        Cause("divided_ranks", whole / ranks, "divided by the ranks, and DDP shards nothing",
              "DDP copies the model."),
        Cause("counted_in_elements", count, "counted in elements", "4 bytes each."),
        *([Cause("one_moment", 4 * count, "AdamW keeps two moments", "8 bytes.")] if state else []),
        Cause("divided_by_2", whole / 2, f"divided by 2, not by {ranks}", "Use `ranks`.")
        if sharded else
        Cause("in_16_bits", whole / 2, "as in 16 bits; this model is fp32", "4 bytes each.")]


NUMBERS = ("memory_allocated", "memory_reserved", "nvidia-smi")
MB = 10**6


@shows("1.7")
def show_rank_states(measured: list[RankMemory], rank_states) -> Picture:
    """What each rank holds after backward, and the student's sum."""
    rows = [MemoryRow(held.name, held.after_backward, _formula_total(rank_states, held))
            for held in measured]
    return memory_bars(rows, "of one rank after backward", unit="MB", lesson=(
        f"Your formula is at most {_worst(rows):.1g} % from what the ranks hold"))


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
    picture = memory_bars(rows, "of one rank at its peak", unit="MB", lesson=(
        f"The predicted peaks are at most {_worst(rows):.1g} % from the measured ones"))
    for held in measured:
        if held.report.allocator:
            picture.text += f"\n{held.name}: {held.report.allocator}"
    return picture


def _worst(rows: list[MemoryRow]) -> float:
    """How far the prediction that is off most is, in percent of what was measured."""
    return 100 * max(abs(row.predicted_total / row.measured.total - 1) for row in rows)


def _formula_total(rank_states, held) -> float:
    return sum(require_numbers(rank_states(held.count, held.strategy, held.ranks), HELD,
                               held.strategy))


def show_other_memory() -> Table:
    """A table of what the notebook's formulas do not count, and which of three numbers show it."""
    named = {name: f"{size / GiB:.3g} GiB" for name, size in hardware.overheads(ranks=2).items()}
    rows = [("DDP's buckets", "a copy of all gradients", "yes", "yes", "yes"),
            ("gathered parameters", "of one block, temporarily of two", "yes", "yes", "yes"),
            ("cuBLAS workspace", named["cuBLAS"], "yes", "yes", "yes"),
            # kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp
            ("rounding", "each tensor to 512 bytes", "yes", "yes", "yes"),
            ("fragmentation", "what the cache keeps and cannot use", "no", "yes", "yes"),
            ("NCCL", named["NCCL"], "no", "no", "yes"),
            ("CUDA context", named["CUDA context"], "no", "no", "yes"),
            ("loaded kernels", named["loaded kernels"], "no", "no", "yes")]
    return print_in_script(Table(
        "other memory of a GPU, by name",
        ("", "bytes", "memory_allocated", "memory_reserved", "nvidia-smi"), rows, left=1,
        note="Sizes: labs.predictions.hardware, with sources; measured on A100, H100 and H200. "
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
    answer = ANSWERS["13B, ZeRO-3"]
    ranks = answer.job.gpus
    parts = hardware.overheads(ranks)
    tensors = answer.held.total + parts["cuBLAS"]
    context = parts["CUDA context"]
    other = context + parts["loaded kernels"] + parts["NCCL"]
    rows = [("CUDA's context", 0, 0, context), ("NCCL", 0, 0, context + parts["NCCL"]),
            ("the step, at its peak", tensors, tensors, tensors + other)]
    return Table(f"MB of one rank, computed: Llama-2-13B, ZeRO-3 on {ranks} × {GPU.name}",
                 ("", *NUMBERS),
                 [(name, *(f"{size / MB:,.0f}" for size in sizes)) for name, *sizes in rows],
                 note="This machine has no GPU, and a CPU has none of the three numbers: this is "
                      "computed. Fragmentation makes reserved larger than allocated.")
