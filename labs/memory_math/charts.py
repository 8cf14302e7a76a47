"""The charts and tables of notebook 01, drawn with the student's own functions."""

from bisect import bisect_left

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_numbers
from labs.exercises.verdicts import Wrong, print_in_script, shows
from labs.memory_math import ground_truth
from labs.memory_math.checks import STATES
from labs.memory_math.checks.activations import SHOWN
from labs.memory_math.checks.rank_states import HELD, STEP_COUNTER
from labs.memory_math.explorer import Setting
from labs.memory_math.ground_truth import SAVED_PARTS
from labs.memory_math.scaffold import CheckpointingCost, RankMemory, model_sizes
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware, parameters
from labs.predictions.activations import korthikanti
from labs.predictions.parameters import shape_of
from labs.training import hf_configs
from labs.training.memory_categories import GB, GiB, Memory

SIZES = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary",
         "positions", "tied", "qkv_bias", "out_bias", "mlp_bias")
STAGES = ("plain data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")
JOBS = {f"{size}, {stage}": Setting(f"Llama-2-{size}", 4, strategy, "bf16, fp32 moments", 1, 4096,
                                    "full")
        for size in ("7B", "13B")
        for stage, strategy in (("DDP", "DDP"), ("ZeRO-3", "ZeRO-3 = FSDP"))}
GPU = hardware.gpu("A100-80")


def show_models() -> Table:
    """A table of the models' sizes, from which all formulas start."""
    rows = [(name, *(f"{value:,}" if type(value) is int else str(value) for value in
                     (getattr(m, name) for m in model_sizes().values()))) for name in SIZES]
    return print_in_script(Table("sizes, by their names in m", ("", *model_sizes()), rows))


def show_block(name: str) -> Table:
    """A table of the parameters of one block of a well-known model, read off the model."""
    block = ground_truth.first_block(hf_configs.on_meta(hf_configs.config(name)))
    rows = [(label, " x ".join(map(str, p.shape)), f"{p.numel():,}")
            for label, p in block.named_parameters()]
    total = ("one block", "", f"{sum(p.numel() for p in block.parameters()):,}")
    return print_in_script(Table(f"{name}, block 0", ("parameter", "shape", "elements"),
                                 [*rows, total], total=True))


@shows("1.1")
def show_outside_blocks(block_parameters, model_parameters) -> Picture:
    """The share of each model's parameters that is in no block, in percent."""
    rows = []
    for name, m in model_sizes().items():
        _, _, block, total = ground_truth.counted_model(name)
        rows.append(Bar(name, 100 * (1 - m.layers * block / total),
                        100 * (1 - m.layers * block_parameters(m) / model_parameters(m)),
                        guessed("1.1") if name == "Llama-3-8B" else None))
    return bars(rows, "%", "of the parameters are in no block (bar: the model itself)")


@shows("1.2")
def show_recipes(bytes_per_parameter, recipes: dict[str, tuple]) -> Picture:
    """Bytes per parameter: the student's, and those of real tensors after a step of AdamW."""
    measured = ground_truth.measured_recipes()
    return memory_bars([MemoryRow(name, measured.get(name),
                                  _states(bytes_per_parameter(*types), name),
                                  guessed("1.2") if name == "bf16, fp32 master" else None)
                        for name, types in recipes.items()], "per parameter", unit="bytes")


@shows("1.2")
def show_quoted_figures(bytes_per_parameter, recipes: dict[str, tuple]) -> Table:
    """A table of GB of model states by recipe: the figures that much material quotes."""
    rows = []
    for name, types in recipes.items():
        held = _states(bytes_per_parameter(*types), name)
        rows.append((name, f"{held.total:g}", f"{7 * held.total:g}", f"{13 * held.total:g}",
                     f"{7 * held.optimizer_state:g}"))
    return Table("GB for models of exactly 7 and 13 billion parameters", (
        "recipe", "bytes per parameter", "7B", "13B", "optimizer of 7B"), rows)


def _states(returned, what) -> Memory:
    return Memory(*require_numbers(returned, STATES, what))


@shows("1.3")
def show_figure_1(per_rank) -> Picture:
    """Figure 1 of the ZeRO paper from the student's function."""
    return _stages(per_rank, 7.5e9, (2, 2, 12), 64, "of one rank: 7.5B, 64 ranks, K = 12")


@shows("1.3")
def show_70b(per_rank) -> Picture:
    """70B on 8 ranks, with the capacities of GPUs and the student's guess."""
    return _stages(per_rank, 70e9, (2, 2, 8), 8, "of one rank: 70B, 8 ranks, 12 bytes each",
                   guessed("1.3"), ("A100-80", "H200", "B200"))


def _stages(per_rank, count, recipe, ranks, title, guess=None, gpus=()) -> Picture:
    rows = [MemoryRow(name, predicted=_states(per_rank(count, recipe, stage, ranks), name),
                      guessed=guess and guess * GB if stage == 2 else None)
            for stage, name in enumerate(STAGES)]
    return memory_bars(rows, title, [(hardware.gpu(name).usable, name) for name in gpus],
                       unit="GB")


@shows("1.3")
def show_savings(per_rank) -> Table:
    """A table of how many times fewer bytes a rank holds, for more and more ranks."""
    def saving(stage, ranks):
        whole, share = (sum(per_rank(1e9, (2, 2, 12), which, ranks)) for which in (0, stage))
        return f"{whole / share:,.2f}".removesuffix(".00")

    rows = [(f"{ranks:,}", *(saving(stage, ranks) for stage in (1, 2, 3)))
            for ranks in (2, 8, 64, 1024, 10**6)]
    return Table("times less than plain data parallelism, 16 bytes per parameter with K = 12",
                 ("ranks", *STAGES[1:]), rows)


def show_saved_tensors() -> Table:
    """A table of the tensors that a real GPT-2 block in bf16 saves for backward, in s·b·h."""
    batch, sequence, hidden, heads = SHOWN
    found = ground_truth.saved_tensors(*SHOWN, fused=False)
    total, unit = sum(tensor.nbytes for tensor in found), batch * sequence * hidden
    # Another version of torch may save other tensors: then they have no names.
    parts = SAVED_PARTS if len(SAVED_PARTS) == len(found) else [""] * len(found)
    rows = [(part, " x ".join(map(str, shape)), str(dtype).removeprefix("torch."),
             f"{nbytes:,}", f"{nbytes / unit:.3g}")
            for part, (nbytes, shape, dtype) in zip(parts, found, strict=True)]
    return print_in_script(Table(
        f"GPT-2 block in bf16 with dropout and eager attention: batch b = {batch}, sequence "
        f"s = {sequence}, hidden h = {hidden}, heads a = {heads}",
        ("saved for backward", "shape", "type", "bytes", "in s·b·h"),
        [*rows, ("together", "", "", f"{total:,}", f"{total / unit:.4g}")], total=True))


@shows("1.4")
def show_layer_activations(layer_activations) -> Picture:
    """What real blocks save, in units of s·b·h, and what the student's formula says."""
    m, batch, sequence = shape_of(hf_configs.config("GPT-2")), 1, 1024
    unit, rows = batch * sequence * m.hidden, []
    for fused, name in ((False, "GPT-2, eager attention"), (True, "GPT-2, fused attention")):
        sizes = batch, sequence, m.hidden, m.heads, fused
        rows.append(Bar(name, ground_truth.saved_bytes(*sizes) / unit,
                        layer_activations(*sizes) / unit, None if fused else guessed("1.4")))
    llama = ground_truth.llama_saved_bytes(1, 128, 256) / (128 * 256)
    rows.append(Bar("Llama-3's proportions, fused", llama))
    return bars(rows, "s·b·h", "bytes saved by one block in bf16 (GPT-2 with 1024 tokens)")


@shows("1.4")
def show_activations(activations) -> Table:
    """A table for Llama-3-8B with a long sequence: what is kept, and what comes on top."""
    m, batch, sequence = shape_of(hf_configs.config("Llama-3-8B")), 1, 8192
    checkpoints = m.layers * korthikanti(batch, sequence, m.hidden, m.heads, recompute="full")
    rows = [("all layers, and the logits", activations(m, batch, sequence, False)),
            ("with checkpointing, at the peak", activations(m, batch, sequence, True)),
            (f"   its {m.layers} checkpoints", checkpoints),
            ("   fp32 logits", 4 * batch * sequence * m.vocabulary),
            ("   one layer, computed again", 34 * batch * sequence * m.hidden)]
    return Table(f"Llama-3-8B, {batch} x {sequence:,} tokens: GB of activations",
                 ("", "GB", "of the checkpoints"),
                 [(name, f"{size / GB:,.3g}", f"{size / checkpoints:.2f}x")
                  for name, size in rows])


@shows("1.5")
def show_checkpointing_cost(cost: CheckpointingCost, step_flops) -> Picture:
    """A step with checkpointing as a multiple of one without: FLOPs counted, time measured."""
    formula = step_flops(10**6, 100, True) / step_flops(10**6, 100, False)
    guess = guessed("1.5")
    rows = [Bar("every product again", cost.flops[2] / cost.flops[0], formula, guess),
            Bar("as torch does it", cost.flops[1] / cost.flops[0], formula, guess),
            Bar(f"time on this {'CPU' if cost.device == 'cpu' else 'GPU'}",
                cost.seconds[1] / cost.seconds[0], formula, guess, colour=palette.MUTED)]
    return bars(rows, "×", "the step without checkpointing (FLOPs counted, time measured)")


@shows("1.5")
def show_checkpointing_memory(cost: CheckpointingCost) -> Picture:
    """Activations at the end of forward without and with checkpointing, measured and predicted."""
    names = ("nothing recomputed", "checkpointing")
    return memory_bars([MemoryRow(name, Memory(activations=kept), predicted)
                        for name, kept, predicted in zip(names, cost.kept, cost.predicted,
                                                         strict=True)],
                       "of activations at the end of forward")


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
    states = _states(per_rank(parameters.count(m), recipe, stage, ranks), "per_rank")
    kept = activations(m, *sizes)
    rest = gpu.usable - bytes_left(*job) - states.total - kept
    if rest < 0:
        raise Wrong("bytes_left counts fewer bytes than per_rank and activations together",
                    "Run its check first.")
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
    rows = []
    for held in measured:
        counters = STEP_COUNTER * held.tensors
        over = held.after_backward.total - _formula_total(rank_states, held)
        rows.append((held.name, f"{held.after_backward.total:,}", f"{over:,.0f}",
                     f"{counters:,}", f"{over - counters:,.0f}"))
    return Table("bytes of one rank after backward", (
        "", "measured", "more than your formula", "AdamW's step counters", "not explained"),
        rows, note=f"AdamW keeps one fp32 counter for each of {measured[0].tensors} tensors.")


@shows("1.7")
def show_peak(measured: list[RankMemory]) -> Picture:
    """The step's peak by category, and the prediction."""
    guess = guessed("1.7")
    rows = [MemoryRow(held.name, held.report.step_peak, held.predicted["peak"].total,
                      guess * 1e6 if guess and held.strategy == "DDP" else None)
            for held in measured]
    picture = memory_bars(rows, "of one rank at its peak", unit="MB")
    worst = max(abs(row.predicted_total / row.measured.total - 1) for row in rows)
    picture.text += f"\nthe prediction is off by at most {100 * worst:.2g} %"
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
