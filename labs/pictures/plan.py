"""What a job takes, with controls: one rank's memory and a step's seconds, as scripts/plan says."""

from labs.pictures import marks, palette
from labs.pictures.in_scripts import print_in_script
from labs.pictures.picture import Picture
from labs.pictures.widgets import Choice, Controls
from labs.predictions.code_bases import CODE_BASES
from labs.predictions.hardware import GPUS, gpu
from labs.predictions.plans.answer import Answer
from labs.predictions.plans.job import RECOMPUTE, SHARDING, Job, Plan, impossible
from labs.predictions.plans.models import shape_named
from labs.training.known_models import SIZES
from labs.training.memory_categories import GB

TOKENS = 4 * 2**20  # of a step
DEFAULTS = dict(model="Llama-3-8B", gpus=64, gpu="H100", sharding="FSDP", tensor=1, pipeline=1,
                micro_batch=1, sequence=4096, recompute="full", code="PyTorch, eager")
_HELD = {"parameters": ("parameters", "gathered parameters"),
         "gradients": ("gradients", "unsharded gradients"),
         "optimizer state": ("optimizer state",), "activations": ("activations",),
         "other": ("logits", "buffers")}
_TAKEN = {"computing": ("matmul", "attention", "memory"),
          "communication": ("tensor", "context", "sharding", "all_reduce", "pipeline"),
          "host": ("launch", "host"), "waiting": ("bubble", "stall")}


def plan(**first) -> Controls:
    """Controls for a job and its plan; below them one rank's memory and the seconds of a step. A
    step is 4 million tokens. first: where they start, e.g. model="Llama-3-70B", gpus=512. Raises
    TypeError or ValueError where there is no such control or choice."""
    unknown = set(first) - set(DEFAULTS)
    if unknown:
        raise TypeError(f"plan has no {unknown.pop()!r}; it has {', '.join(DEFAULTS)}")
    chosen = {**DEFAULTS, **first}
    choices = [_choice(name, label, kind, options, chosen[name])
               for name, label, kind, options in _controls()]
    return print_in_script(Controls(choices, draw_plan, columns=2))


def _controls() -> list[tuple]:
    """(name, label, kind, options) of each."""
    def powers(first, last):
        return [2**power for power in range(first, last + 1)]

    return [("model", "model", "menu", tuple(SIZES)), ("gpus", "GPUs", "slider", powers(0, 10)),
            ("gpu", "GPU", "menu", tuple(GPUS)),
            ("tensor", "tensor-parallel", "slider", powers(0, 3)),
            ("sharding", "sharding", "menu", SHARDING),
            ("pipeline", "pipeline", "slider", powers(0, 4)),
            ("recompute", "recompute", "menu", RECOMPUTE),
            ("micro_batch", "micro-batch", "slider", powers(0, 5)),
            ("code", "code base", "menu", tuple(CODE_BASES)),
            ("sequence", "sequence", "slider", powers(9, 17))]


def _choice(name, label, kind, options, value) -> Choice:
    if value not in options:
        raise ValueError(f"{name}={value!r}: choose {', '.join(map(repr, options))}")
    return Choice(name, label, [(f"{option:,}" if isinstance(option, int) else option, option)
                                for option in options], value, kind)


def draw_plan(*, model, gpus, gpu, sharding, tensor, pipeline, micro_batch, sequence, recompute,
              code) -> Picture:
    """The picture of one plan; of one that cannot be run the reason."""
    job, chosen = _asked(model, gpus, gpu, sharding, tensor, pipeline, micro_batch, sequence,
                         recompute, code)
    if reason := impossible(job, chosen):
        figure, [ax] = marks.bar_chart(["–"], [[marks.LabelledBar({})]], ["GB"], 1.5)
        ax.set_axis_off()
        marks.headline(figure, f"No such plan: {reason}")
        return Picture(figure, f"No such plan: {reason}")
    answer = Answer(job, chosen)
    held, taken = _bars(answer)
    row = f"{gpus:,} × {gpu}"
    figure, axes = marks.bar_chart(
        [row], [[held], [taken]], ["GB of the rank that holds most", "seconds of a step"],
        2.1 + marks.HEADLINE)
    room = (job.gpu.usable - answer.overhead) / GB
    marks.draw_limit(axes[0], room)
    marks.headline(figure, lesson(answer))
    marks.draw_legend(figure, [held, taken])
    marks.note_below(figure, _note(answer, room))
    return Picture(figure, "\n".join([
        lesson(answer), f"memory {held.label}{held.by_part()}",
        f"step {taken.label}{taken.by_part()}", _note(answer, room)]), data=answer)


def _asked(model, gpus, card, sharding, tensor, pipeline, micro_batch, sequence, recompute, code):
    """(job, plan); data is what is left over of the GPUs."""
    data = max(1, gpus // (tensor * pipeline))
    each = data * micro_batch
    batch = max(1, TOKENS // sequence // each) * each
    base = CODE_BASES[code]
    job = Job(model, shape_named(model), sequence, batch, gpu(card), gpus, min(8, gpus),
              "bf16 policy" if code.startswith("PyTorch") else None, code=base)
    return job, Plan(data, tensor, pipeline, sharding=sharding, micro_batch=micro_batch,
                     recompute=recompute)


def _bars(answer) -> tuple[marks.LabelledBar, marks.LabelledBar]:
    stage, most = answer.largest
    parts = answer.stages[stage]
    held = {name: sum(parts.get(part, 0) for part in of) / GB for name, of in _HELD.items()}
    taken = {name: sum(getattr(answer.seconds, cause) for cause in of)
             for name, of in _TAKEN.items()}
    low, high = answer.memory_factors.of(most / GB)
    fast, slow = answer.seconds_factors.of(answer.seconds.total)
    return (marks.LabelledBar(held, f"{most / GB:.3g} GB", whisker=(low, high)),
            marks.LabelledBar(taken, f"{answer.seconds.total:.3g} s", whisker=(fast, slow),
                              colour=palette.LOST["waiting"]))


def lesson(answer: Answer) -> str:
    """What the plan's picture shows, in a sentence."""
    room = answer.job.gpu.usable - answer.overhead
    _, most = answer.largest
    fitting = (f"Fits: {most / GB:.3g} of {room / GB:.3g} GB" if answer.is_feasible
               else f"Does not fit: {most / GB:.3g} GB where {room / GB:.3g} are free")
    bound = ("launch-bound, the GPUs wait for their hosts" if answer.is_launch_bound
             else f"most of it {answer.causes()[0][0]}")
    return (f"{fitting}; a step takes {answer.seconds.total:.3g} s, {bound}; "
            f"{answer.tokens_per_s / answer.job.gpus:,.0f} tokens/s a GPU, MFU {answer.mfu:.0%}")


def _note(answer, room) -> str:
    kinds = (answer.memory_factors.kind, answer.seconds_factors.kind)
    return (f"{answer.plan}; {answer.job.batch:,} sequences a step. The dashed line: {room:.3g} GB "
            "that CUDA and NCCL leave free. 80 % of measured runs of this kind lie within the "
            f"whiskers ({'; '.join(dict.fromkeys(kinds))}).")
