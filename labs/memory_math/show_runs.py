"""The pictures and tables of exercises 1.5 to 1.7 and of what formulas leave out."""

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Wrong, print_in_script, shows
from labs.memory_math.answers import numbers
from labs.memory_math.checks import STATES
from labs.memory_math.fit_checks import HELD
from labs.pictures import palette
from labs.pictures.measured import Bar, bars
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.tables import Table
from labs.predictions import hardware, memory, parameters
from labs.predictions.parameters import shape_of
from labs.training import hf_configs
from labs.training.memory_categories import GB, GiB, Memory

RECIPE = (2, 2, 8)  # bytes per parameter in the self-check: bf16 with fp32 moments
SELF_CHECK = (("7B, DDP", "Llama-2-7B", 0), ("7B, ZeRO-3", "Llama-2-7B", 3),
              ("13B, DDP", "Llama-2-13B", 0), ("13B, ZeRO-3", "Llama-2-13B", 3))
RANKS, GPU, BATCH, SEQUENCE = 4, "A100-80", 1, 4096
ROUNDED = 512  # bytes; c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize


@shows("1.5")
def show_price(price, step_flops):
    """A step with checkpointing as a multiple of one without: operations counted, time taken."""
    said = step_flops(10**6, 100, True) / step_flops(10**6, 100, False)
    guess = guessed("a step with checkpointing, times one without")
    rows = [Bar("every product again", price.flops[2] / price.flops[0], said, guess),
            Bar("as torch does it", price.flops[1] / price.flops[0], said, guess),
            Bar("time on this CPU", price.seconds[1] / price.seconds[0], said, guess,
                colour=palette.MUTED)]
    return bars(rows, "×", "the step without checkpointing (FLOPs counted, time measured)")


@shows("1.5")
def show_kept(price):
    """Activations at the end of forward without and with checkpointing, and their closed form."""
    return memory_bars([MemoryRow(name, Memory(activations=kept), predicted)
                        for name, kept, predicted in
                    zip(("nothing recomputed", "checkpointing"), price.kept, price.predicted,
                        strict=True)], "of activations at the end of forward")


@shows("1.6")
def show_left(bytes_left):
    """GB left in each job of the self-check, and the largest batch that fits."""
    rows = []
    for name, *job in _jobs():
        left = bytes_left(*job) / GB
        rows.append((name, f"{left:,.2f}", "fits" if left >= 0 else "does not fit",
                     _largest(bytes_left, job) or "none"))
    return Table(f"{RANKS} × {GPU}, {BATCH} × {SEQUENCE} tokens per rank, checkpointing, "
                 f"{sum(RECIPE)} bytes per parameter",
                 ("", "GB left by your function", "", "largest batch"), rows)


def _jobs() -> list:
    return [(name, shape_of(hf_configs.config(model)), RECIPE, stage, RANKS, BATCH, SEQUENCE, True,
             hardware.gpu(GPU)) for name, model, stage in SELF_CHECK]


def _largest(bytes_left, job) -> int:
    """The largest batch with nothing less than 0 left, by halving."""
    def fits(batch):
        return bytes_left(*job[:4], batch, *job[5:]) >= 0

    low, high = 0, 1024
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@shows("1.6")
def show_self_check(bytes_left, per_rank, activations):
    """The student's estimate of each job above the closed form that leaves nothing out."""
    rows, guess = [], guessed("GB per rank, 13B with ZeRO-3 on 4 ranks")
    for (name, *job), (_, model, stage) in zip(_jobs(), SELF_CHECK, strict=True):
        mine = _estimate(bytes_left, per_rank, activations, job)
        rows += [MemoryRow(f"{name}, your estimate", predicted=mine,
                       guessed=guess * GB if guess and name == "13B, ZeRO-3" else None),
                 MemoryRow("with every buffer", predicted=complete(model, stage))]
    return memory_bars(rows, f"of one rank, {RANKS} × {GPU}", [(hardware.gpu(GPU).usable, GPU)],
                   unit="GB")


def _estimate(bytes_left, per_rank, activations, job) -> Memory:
    """The student's bytes by category; what is not states or activations is overhead."""
    m, recipe, stage, ranks, batch, sequence, checkpointing, gpu = job
    said = per_rank(parameters.count(m), recipe, stage, ranks)
    states = Memory(*numbers(said, STATES, "per_rank"))
    kept = activations(m, batch, sequence, checkpointing)
    needed = gpu.usable - bytes_left(*job)
    rest = needed - states.total - kept
    if rest < 0:
        raise Wrong("bytes_left counts fewer bytes than per_rank and activations together",
                    "Run its check first.")
    return states + Memory(activations=kept, other=rest)


def complete(model: str, stage: int) -> Memory:
    """One rank of the self-check at its peak, with buckets, gathered parameters, the optimizer's
    temporaries, CUDA and NCCL."""
    peak = memory.predict(hf_configs.config(model), batch=BATCH, sequence=SEQUENCE, ranks=RANKS,
                          strategy="zero3" if stage else "ddp", recipe="bf16, fp32 moments",
                          checkpointing="full", device="cuda")["peak"]
    return peak + Memory(other=hardware.overhead(RANKS))


@shows("1.7")
def show_states(measured, rank_states):
    """After backward: what each rank holds, and the student's sum."""
    return memory_bars([MemoryRow(_name(held), held.after_backward, sum(_said(rank_states, held)))
                    for held in measured], "of one rank after backward", unit="MB")


@shows("1.7")
def show_leftovers(measured, rank_states):
    """What the student's numbers leave over, with a name, to the byte."""
    rows = []
    for held in measured:
        counters = 4 * held.tensors
        over = held.after_backward.total - sum(_said(rank_states, held))
        rows.append((_name(held), f"{held.after_backward.total:,}", f"{over:,.0f}",
                     f"{counters:,}", f"{over - counters:,.0f}"))
    return Table("bytes of one rank after backward", (
        "", "measured", "left over by yours", "AdamW's step counters", "still without a name"),
        rows, note=f"AdamW counts its steps in one fp32 number for each of "
                   f"{measured[0].tensors} tensors.")


@shows("1.7")
def show_peak(measured):
    """The step's peak by category, and the closed form's prediction."""
    guess = guessed("MB per rank at the peak, DDP")
    rows = [MemoryRow(_name(held), held.report.step_peak, held.predicted["peak"].total,
                  guess * 1e6 if guess and held.strategy == "DDP" else None)
            for held in measured]
    picture = memory_bars(rows, "of one rank at its fullest moment", unit="MB")
    worst = max(abs(row.formula / row.measured.total - 1) for row in rows)
    picture.text += f"\nthe closed form is off by at most {100 * worst:.2g} %"
    return picture


def _said(rank_states, held) -> tuple:
    return numbers(rank_states(held.count, held.strategy, held.ranks), HELD, held.strategy)


def _name(held) -> str:
    return f"{held.strategy}, {held.ranks} rank{'s' * (held.ranks > 1)}"


def show_rest():
    """What no formula of this notebook counts, and which of three numbers shows it."""
    named = hardware.overheads(ranks=2)
    rows = [("DDP's buckets", "a copy of all gradients", "yes", "yes", "yes"),
            ("gathered parameters", "of one block, for a moment two", "yes", "yes", "yes"),
            ("cuBLAS workspace", _gib(named["cuBLAS"]), "yes", "yes", "yes"),
            ("rounding", f"each tensor to {ROUNDED} bytes", "yes", "yes", "yes"),
            ("fragmentation", "what the cache keeps and cannot use", "no", "yes", "yes"),
            ("NCCL", _gib(named["NCCL"]), "no", "no", "yes"),
            ("CUDA context", _gib(named["CUDA context"]), "no", "no", "yes")]
    return print_in_script(Table("the rest, by name",
                                 ("", "bytes", "memory_allocated", "memory_reserved",
                                            "nvidia-smi"), rows, left=1,
                      note="Sizes: labs.predictions.hardware, with sources; measured on A100 and "
                           "H100. nvidia-smi's number is the largest, and the one that must fit."))


def _gib(nbytes) -> str:
    return f"{nbytes / GiB:.3g} GiB"
