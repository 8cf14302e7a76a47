"""Checks of exercises 1.6 and 1.7: does it fit, and what ranks really hold."""

import functools
import random

from labs.exercises.verdicts import Wrong, check
from labs.memory_math import measuring
from labs.memory_math.activation_checks import model_activations
from labs.memory_math.answers import Slip, close, compare, instead, number, numbers, takes
from labs.predictions import hardware, parameters
from labs.predictions.parameters import shape_of
from labs.training import hf_configs
from labs.training.memory_categories import GB

JOB = ("m", "recipe", "stage", "ranks", "batch", "sequence", "checkpointing", "gpu")
HELD = ("parameters", "gradients", "optimizer state", "buffers")


@check("1.6")
def check_bytes_left(bytes_left):
    """Bytes that are left on a GPU, for jobs that fit, for jobs that do not, and for drawn ones."""
    takes(bytes_left, JOB)
    for name, *job in _jobs():
        m, recipe, stage, ranks, batch, sequence, checkpointing, gpu = job
        what = (f"{name}, stage {stage} on {ranks} x {gpu.name}, {batch} x {sequence} tokens"
                f"{', checkpointing' if checkpointing else ''}")
        said = number(bytes_left(*job), what)
        want, slips = _left(*job)
        compare(said / GB, want / GB, what, "GB", slips,
                "usable - model states - activations - overhead.")
    return "the bytes left in six jobs, two of them drawn at random"


def _jobs() -> list:
    dice = random.Random()
    sizes = {name: shape_of(hf_configs.config(name)) for name in hf_configs.NAMES}
    drawn = [(name, sizes[name], tuple(dice.sample(range(1, 13), 3)), dice.randint(0, 3),
              dice.randint(2, 64), dice.randint(1, 8), 128 * dice.randint(1, 16),
              dice.random() < 0.5, hardware.gpu(dice.choice(list(hardware.GPUS))))
             for name in dice.sample(hf_configs.NAMES, 2)]
    a100, t4 = hardware.gpu("A100-80"), hardware.gpu("T4")
    return [("Llama-2-13B", sizes["Llama-2-13B"], (2, 2, 8), 0, 4, 1, 4096, True, a100),
            ("Llama-2-13B", sizes["Llama-2-13B"], (2, 2, 8), 3, 4, 1, 4096, True, a100),
            ("Llama-2-7B", sizes["Llama-2-7B"], (2, 2, 8), 0, 4, 1, 4096, True, a100),
            ("GPT-2", sizes["GPT-2"], (4, 4, 8), 0, 1, 8, 1024, False, t4), *drawn]


def _left(m, recipe, stage, ranks, batch, sequence, checkpointing, gpu) -> tuple:
    """(bytes left, slips in GB)."""
    count = parameters.count(m)
    states = sum(count * size / (ranks if stage >= least else 1)
                 for size, least in zip(recipe, (3, 2, 1), strict=True))
    kept = model_activations(m, batch, sequence, checkpointing)
    overhead = hardware.overhead(ranks)
    want = gpu.usable - states - kept - overhead
    whole, even = count * sum(recipe), count * sum(recipe) / ranks
    slips = {
        overhead: ("what CUDA and NCCL take is missing", "lab.overhead(ranks) knows it."),
        overhead - hardware.overhead(1): ("NCCL's buffers are missing",
                                          "Give lab.overhead the number of ranks."),
        kept: ("the activations are missing", "Exercise 1.4 gave you a function."),
        kept - model_activations(m, batch, sequence, not checkpointing): (
            "activations as if checkpointing were "
            + ("off" if checkpointing else "on"), "Pass `checkpointing` on."),
        kept - model_activations(m, batch * ranks, sequence, checkpointing): (
            "the sequences of all ranks are counted", "`batch` are those of one rank."),
        gpu.nominal - gpu.usable: ("the data sheet's capacity is not what CUDA gives",
                                   "Use gpu.usable."),
        states - count * recipe[0] / (ranks if stage >= 3 else 1): (
            "of the model states only parameters are counted", "per_rank returns three numbers."),
        states: ("the model states are missing", "Exercise 1.3 gave you a function."),
        states - whole: ("nothing is divided among the ranks", "Pass stage and ranks on."),
        states - even: ("everything is divided by the ranks", "Pass the stage on."),
    }
    made = [Slip(adds / GB, *words) for adds, words in slips.items()]
    return want, [*made, instead(-want / GB, want / GB, "that is what is missing, not what is left",
                                 "Negative means: it does not fit."),
                  instead(want / GB / GB, want / GB, "that is in GB", "Return bytes."),
                  instead(0, want / GB, "nothing is left, but how much is missing?",
                          "Less than 0 where the job does not fit: no max."),
                  instead((gpu.usable - want) / GB, want / GB, "that is what is needed, not left",
                          "Take it from gpu.usable.")]


@check("1.7")
def check_rank_states(rank_states):
    """Four numbers for plain, DDP and FSDP2, against ranks that really train."""
    takes(rank_states, ("count", "strategy", "ranks"))
    for strategy, ranks in measuring.JUDGED:
        count, tensors, held = _really_held(strategy, ranks)
        what = f"{strategy} on {ranks} rank{'s' * (ranks > 1)}"
        said = numbers(rank_states(count, strategy, ranks), HELD, what)
        for name, got, real in zip(HELD, said, held.by_name_of(HELD), strict=True):
            _compare_held(what, name, got, real, count, ranks, 4 * tensors)
    return ("to the byte what ranks hold after backward, but for AdamW's step counters "
            f"({4 * tensors} bytes)")


@functools.cache
def _really_held(strategy, ranks):
    return measuring.judged(strategy, ranks)


def _compare_held(what, name, got, real, count, ranks, counters):
    spare = {"optimizer state": counters, "buffers": 0.02 * count * 4}.get(name, 0)
    if abs(got - real) <= spare and (name != "optimizer state" or got <= real):
        return
    words = f"{what}: a rank holds {real:,.0f} bytes of {name}, you say {got:,.10g}"
    for value, slip, hint in _held_slips(name, count, ranks):
        if close(got, value):
            raise Wrong(f"{words}: {slip}", hint)
    raise Wrong(f"{words}" + (f", {got / real:.4g}x" if real else ""),
                "fp32 and AdamW: 4 + 4 + 8 bytes per parameter; who divides, and who copies?")


def _held_slips(name, count, ranks) -> list:
    whole = count * (8 if name == "optimizer state" else 4)
    return [
        (0, "there are some",
         "DDP copies all gradients into its buckets." if name == "buffers" else "Look at AdamW."),
        (whole, "not divided" if name != "buffers" else "there is no such copy here",
         "FSDP divides parameters, gradients and optimizer state; only DDP has buckets."),
        (whole / ranks, "divided by the ranks, and DDP divides nothing", "DDP copies the model."),
        (count, "counted in elements", "4 bytes each."),
        (4 * count * (name == "optimizer state"), "AdamW keeps two moments", "8 bytes."),
        (whole / 2, "as in 16 bits; this model is fp32", "4 bytes each.")]
