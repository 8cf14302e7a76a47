"""Exercise 1.6: does a job fit on a GPU, and how large may its batch be?"""

from dataclasses import replace

from labs.checks.generator import new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Cause,
    Single,
    judge_number,
    pairs,
    require_number,
    require_signature,
)
from labs.checks.verdicts import Wrong, check, shows
from labs.memory_math.activations import model_activations
from labs.memory_math.bytes_per_parameter import states_of
from labs.memory_math.per_rank import states_per_rank
from labs.memory_math.scaffold import MODELS
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.plan_memory import data_parallel_answer
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.memory import parameters
from labs.predictions.memory.parameters import shape_of
from labs.training import hf_configs
from labs.training.memory_categories import GB, Memory

NOTHING: Cause = Cause("nothing_left", 0, "nothing is left, but how much is missing?",
                       "Less than 0 where the job does not fit: no max.")
ARGUMENTS = ("m", "recipe", "stage", "ranks", "batch", "sequence", "checkpointing", "gpu")
WITHOUT_BATCH = tuple(name for name in ARGUMENTS if name != "batch")


@check("1.6")
def check_bytes_left(bytes_left, largest_batch):
    """Bytes that are left on a GPU, for jobs that fit, jobs that do not, and random ones; and the
    largest batch that leaves 0 or more."""
    require_signature(bytes_left, ARGUMENTS)
    require_signature(largest_batch, WITHOUT_BATCH)
    jobs = _jobs()
    for name, *job in jobs:
        _, _, stage, ranks, batch, sequence, checkpointing, gpu = job
        what = (f"{name}, stage {stage} on {ranks} x {gpu.name}, {batch} x {sequence} tokens"
                f"{', checkpointing' if checkpointing else ''}")
        left, causes = _bytes_left(*job)
        # In GB, so that two sums of large numbers agree up to their rounding.
        answer = bytes_left(*job)
        # What is left is a small difference of large numbers: float32 has errors of the large ones.
        number = require_number(answer, what)
        causes = [NOTHING] * (number == 0) + causes  # before those that are nearly 0 in GB
        judge_number(number / GB, left / GB, causes, what, "GB",
                     "usable - model states - activations - overhead.",
                     abs_tol=1e-6 * gpu.usable / GB if isinstance(number, Single) else 1e-9)
    # Short sequences of a small model: the batch is larger than any limit that one would guess.
    many = "GPT-2", jobs[3][1], (2, 2, 8), 1, 2, 1, 128, True, hardware.gpu("H200")
    for name, *job in [*jobs, many]:
        _judge_batch(largest_batch, name, *job)
    return "the bytes left in six jobs, two of them random, and the largest batch of seven"


def _jobs() -> list[tuple]:
    """(name, *ARGUMENTS) of each."""
    rng = new_generator()
    sizes = {name: shape_of(hf_configs.config(name)) for name in MODELS}
    drawn = [(name, sizes[name], tuple(rng.sample(range(1, 13), 3)), rng.randint(0, 3),
              rng.randint(2, 64), rng.randint(1, 8), 128 * rng.randint(1, 16),
              rng.random() < 0.5, hardware.gpu(rng.choice(list(hardware.GPUS))))
             for name in rng.sample(MODELS, 2)]
    a100, t4 = hardware.gpu("A100-80"), hardware.gpu("T4")
    return [("Llama-2-13B", sizes["Llama-2-13B"], (2, 2, 8), 0, 4, 1, 4096, True, a100),
            ("Llama-2-13B", sizes["Llama-2-13B"], (2, 2, 8), 3, 4, 1, 4096, True, a100),
            ("Llama-2-7B", sizes["Llama-2-7B"], (2, 2, 8), 0, 4, 1, 4096, True, a100),
            ("GPT-2", sizes["GPT-2"], (4, 4, 8), 0, 1, 8, 1024, False, t4), *drawn]


def _bytes_left(m, recipe, stage, ranks, batch, sequence, checkpointing,
                gpu) -> tuple[float, list[Cause]]:
    """(bytes left, common causes in GB)."""
    count, overhead = parameters.count(m), hardware.overhead(ranks)
    states = states_per_rank(count, recipe, stage, ranks)
    kept = model_activations(m, batch, sequence, checkpointing)
    left = gpu.usable - sum(states) - kept - overhead
    more = [  # bytes that a mistake leaves in addition
        Cause("cuda_nccl_take_missing", overhead, "what CUDA and NCCL take is missing",
              "lab.overhead(ranks) knows it."),
        Cause("nccl_buffers_missing", overhead - hardware.overhead(1), "NCCL's buffers are missing",
              "Give lab.overhead the number of ranks."),
        Cause("activations_missing", kept, "the activations are missing",
              "Exercise 1.4 gave you a function."),
        Cause("activations_if_checkpointing",
              kept - model_activations(m, batch, sequence, not checkpointing), "activations as if "
              f"checkpointing were {'off' if checkpointing else 'on'}",
              "Pass `checkpointing` on."),
        Cause("sequences_all_ranks_counted",
              kept - model_activations(m, batch * ranks, sequence, checkpointing),
              "the sequences of all ranks are counted", "`batch` are those of one rank."),
        Cause("data_sheet_capacity_not_cuda", gpu.nominal - gpu.usable,
              "the data sheet's capacity is not what CUDA gives", "Use gpu.usable."),
        Cause("model_states_only_parameters", sum(states[1:]),
              "of the model states only parameters are counted",
              "per_rank returns three numbers."),
        Cause("model_states_missing", sum(states), "the model states are missing",
              "Exercise 1.3 gave you a function."),
        Cause("nothing_divided_among_ranks", sum(states) - count * sum(recipe),
              "nothing is sharded over the ranks", "Pass stage and ranks on."),
        Cause("everything_divided_ranks", sum(states) - count * sum(recipe) / ranks,
              "everything is sharded over the ranks", "Pass the stage on.")]
    causes = [replace(one, number=(left + one.number) / GB) for one in more]
    return left, [*causes, *_unit_causes(left, gpu), *pairs(causes, left / GB)]


def _judge_batch(largest_batch, name, m, recipe, stage, ranks, _, sequence, checkpointing, gpu):
    job = m, recipe, stage, ranks, sequence, checkpointing, gpu
    what = (f"{name}, stage {stage} on {ranks} x {gpu.name}, sequences of {sequence} tokens"
            f"{', checkpointing' if checkpointing else ''}")
    empty, one = (_bytes_left(*job[:4], batch, *job[4:])[0] for batch in (0, 1))
    # Activations grow with the batch, so what is left falls by as much for each sequence.
    exact = empty / (empty - one)
    largest = max(0, int(exact))
    # Each mistake and where it leads: catches the first batch that does not fit, the batch of all
    # ranks, a fraction of a sequence, and a negative number where none fits.
    causes = [Cause("first_too_large", largest + 1, "that many do not fit",
                    "A batch fits if it leaves 0 bytes or more."),
              *([Cause("one_too_few", largest - 1, f"{unless_graded(largest)} fit, too",
                       "A batch fits if it leaves 0 bytes or more.")] if largest else []),
              Cause("sequences_all_ranks_counted", largest * ranks,
                    "that is the batch of all ranks together", "Return the batch of one rank."),
              Cause("not_rounded_down", exact, "that is no whole number of sequences",
                    "Round down; 0 where not even one fits.")]
    judge_number(require_number(largest_batch(*job), what), largest, causes, what, "sequences",
                 "Try 1, 2, 3 ... sequences, as long as bytes_left leaves 0 or more." if largest
                 else "Return 0 where not even one sequence fits.", source="the largest batch is")


def _unit_causes(left, gpu) -> list[Cause]:
    return [
        Cause("missing", -left / GB, "that is what is missing, not what is left",
              "Negative means: it does not fit."),
        Cause("in_gb", left / GB / GB, "that is in GB", "Return bytes."),
        Cause("in_gib", left / 2**30 / GB, "that is in GiB", "Return bytes."),
        Cause("share_gpu_memory", left / gpu.usable / GB, "that is a share of the GPU's memory",
              "Return bytes."),
        Cause("needed", (gpu.usable - left) / GB, "that is what is needed, not left",
              "Take it from gpu.usable.")]


ANSWERS = {f"{size}, {stage}": data_parallel_answer(
    model=f"Llama-2-{size}", gpus=4, sharding=sharding, recipe="bf16, fp32 moments", micro_batch=1,
    sequence=4096, recompute="full")
    for size in ("7B", "13B") for stage, sharding in (("DDP", "DDP"), ("ZeRO-3", "FSDP"))}
"""Name of a job -> what it takes, every tensor counted (when it is asked for)."""
GPU = hardware.gpu("A100-80")


@shows("1.6")
def show_bytes_left(bytes_left, largest_batch) -> Table:
    """A table of the GB that are left in each job, and of the largest batch that fits: both by the
    student's functions."""
    rows = []
    for name, answer in ANSWERS.items():
        job = _job(answer)
        left = bytes_left(*job) / GB
        largest = require_number(largest_batch(*job[:4], *job[5:]), "largest_batch")
        rows.append((name, f"{left:,.2f}", "fits" if left >= 0 else "does not fit",
                     f"{largest:g}" if largest else "none"))
    return Table(f"4 × {GPU.name}, 1 × 4096 tokens per rank, checkpointing, 12 bytes per parameter",
                 ("", "GB left by your function", "", "largest batch"), rows)


def _job(answer) -> tuple:
    """The job as arguments of the student's bytes_left."""
    job, plan = answer.job, answer.plan
    # 2, 2, 8: bytes per parameter of bf16 parameters and gradients, and of two fp32 moments.
    return (job.shape, (2, 2, 8), 3 if plan.is_fsdp else 0, job.gpus, plan.micro_batch,
            job.sequence, True, GPU)


@shows("1.6")
def show_self_check(bytes_left, per_rank, activations) -> Picture:
    """The student's estimate of each job above the prediction that counts every buffer."""
    rows, guess = [], guessed("1.6")
    for name, answer in ANSWERS.items():
        mine = _estimate(bytes_left, per_rank, activations, _job(answer))
        rows += [MemoryRow(f"{name}, your estimate", predicted=mine,
                           guessed=guess * GB if guess and name == "13B, ZeRO-3" else None),
                 MemoryRow("with every buffer",
                           predicted=answer.held + Memory(other=answer.overhead))]
    off = max(abs(mine.predicted.total / exact.predicted.total - 1)
              for mine, exact in zip(rows[::2], rows[1::2], strict=True))
    return memory_bars(rows, f"of one rank, 4 × {GPU.name}", [(GPU.usable, GPU.name)], unit="GB",
                       lesson=f"Your estimates are at most {off:.0%} from the predictions with "
                              "every buffer")


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
