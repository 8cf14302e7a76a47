"""What a job takes, with controls: one rank's memory and a step's seconds, as scripts/plan says."""

from dataclasses import replace

from labs.pictures import marks, palette
from labs.pictures.in_scripts import print_in_script
from labs.pictures.picture import Picture
from labs.pictures.widgets import Controls, choices, powers_of_two
from labs.predictions.code_bases import CODE_BASES
from labs.predictions.hardware import GPUS, gpu
from labs.predictions.plans.answer import Answer
from labs.predictions.plans.job import RECOMPUTE, SCHEDULES, SHARDING, Job, Plan, impossible
from labs.predictions.plans.models import shape_named
from labs.training.known_models import SIZES
from labs.training.memory_categories import GB

TOKENS = 4 * 2**20  # of a step
DEFAULTS = dict(model="Llama-3-8B", gpus=64, gpu="H100", sharding="FSDP", tensor=1, pipeline=1,
                micro_batch=1, sequence=4096, recompute="full", code="PyTorch, eager",
                expert=1)
_TAKEN = {"computing": ("matmul", "attention", "memory"),
          "communication": ("tensor", "context", "expert", "sharding", "all_reduce", "pipeline"),
          "host": ("launch", "host"), "waiting": ("bubble", "stall")}
# that of palette.LOST is the optimizer state's, which stands beside it
_WAITING = palette.PHASES["exposed"]


def plan(only: str = "", *, job: Job | None = None, plan: Plan | None = None,
         **first) -> Controls:
    """Controls for a job and its plan; below them one rank's memory and the seconds of a step.

    A step is 4 million tokens. first: where the controls start, e.g. model="Llama-3-70B", gpus=512.
    only="memory": one rank of a data-parallel job, whose step is one micro-batch, and the GPUs that
    it fits on. job, plan: a job of one's own, and a plan to start from, beside which the
    chosen one is drawn; the controls are then the plan's. Raises TypeError or ValueError where
    there is no such control or choice.
    """
    if only not in ("", "memory"):
        raise ValueError(f'only={only!r}: choose "memory", or leave it out')
    if (job is None) != (plan is None) or only and job:
        raise TypeError('plan takes a job and a plan together, without only="memory"')
    if only:
        from labs.pictures.plan_memory import draw_memory, memory_choices, memory_live

        return print_in_script(Controls(memory_choices(first), draw_memory, memory_live, columns=2))
    if job:
        return print_in_script(_of_job(job, plan, first))
    return print_in_script(Controls(choices("plan", _controls(), first, **DEFAULTS), draw_plan,
                                    columns=2))


def _controls() -> list[tuple]:
    """(name, label, kind, options) of each."""
    return [("model", "model", "menu", tuple(SIZES)),
            ("gpus", "GPUs", "slider", powers_of_two(0, 10)),
            ("gpu", "GPU", "menu", tuple(GPUS)),
            ("tensor", "tensor-parallel", "slider", powers_of_two(0, 3)),
            ("sharding", "sharding", "menu", SHARDING),
            ("pipeline", "pipeline", "slider", powers_of_two(0, 4)),
            ("recompute", "recompute", "menu", RECOMPUTE),
            ("micro_batch", "micro-batch", "slider", powers_of_two(0, 5)),
            ("code", "code base", "menu", tuple(CODE_BASES)),
            ("sequence", "sequence", "slider", powers_of_two(9, 17)),
            ("expert", "expert-parallel", "slider", powers_of_two(0, 6))]


def _of_job(job: Job, start: Plan, first) -> Controls:
    """Controls for the plan of this job."""
    if reason := impossible(job, start):
        raise ValueError(reason)
    controls = [("sharding", "sharding", "menu", SHARDING),
                ("tensor", "tensor-parallel", "slider", powers_of_two(0, 3)),
                ("recompute", "recompute", "menu", RECOMPUTE),
                ("pipeline", "pipeline", "slider", powers_of_two(0, 4))]
    if start.pipeline > 1:
        controls += [("schedule", "schedule", "menu", SCHEDULES),
                     ("chunks", "chunks", "slider", powers_of_two(0, 3))]
    controls += [("context", "context-parallel", "slider", powers_of_two(0, 4)),
                 ("micro_batch", "micro-batch", "slider", powers_of_two(0, 5))]
    chosen = choices("plan", controls, first, **vars(start))

    def draw(**changes) -> Picture:
        others = changes["tensor"] * changes["pipeline"] * changes["context"]
        asked = replace(start, data=max(1, job.gpus // others), **changes)
        plans = {"start": start} | ({} if asked == start else {"chosen": asked})
        return _drawn(job, plans, str(job))

    return Controls(chosen, draw, columns=2)


def draw_plan(*, model, gpus, gpu, sharding, tensor, pipeline, micro_batch, sequence, recompute,
              code, expert) -> Picture:
    """The picture of one plan; of one that cannot be run the reason."""
    job, asked = _asked(model, gpus, gpu, sharding, tensor, pipeline, micro_batch, sequence,
                        recompute, code, expert)
    return _drawn(job, {f"{model}\n{gpus:,} × {gpu}": asked},
                  f"{job.batch:,} sequences a step")


def _drawn(job, plans, job_named) -> Picture:
    """A row for each named plan; the sentences are of the last one, and of the job."""
    *_, last = plans.values()
    if reason := impossible(job, last):
        figure, [ax] = marks.bar_chart(["–"], [[marks.LabelledBar({})]], ["GB"], 1.5)
        ax.set_axis_off()
        marks.headline(figure, f"No such plan: {reason}")
        return Picture(figure, f"No such plan: {reason}")
    answers = {name: Answer(job, each) for name, each in plans.items()}
    answer = answers[[*answers][-1]]
    bars = {name: _bars(each) for name, each in answers.items()}
    figure, axes = marks.bar_chart(
        [*bars], [*zip(*bars.values(), strict=True)],
        ["GB of the rank that holds most", "seconds of a step"],
        1.6 + 0.5 * len(bars) + marks.HEADLINE)
    room = (job.gpu.usable - answer.overhead) / GB
    marks.draw_limit(axes[0], room)
    marks.headline(figure, lesson(answer))
    marks.draw_legend(figure, [bar for row in bars.values() for bar in row])
    note = f"{answer.plan}; {job_named}. {_note(answer, room)}"
    marks.note_below(figure, note)
    words = [f"{name + ': ' if len(bars) > 1 else ''}{what} {bar.label}{bar.by_part()}"
             for name, row in bars.items() for what, bar in zip(("memory", "step"), row,
                                                                strict=True)]
    return Picture(figure, "\n".join([lesson(answer), *words, note]), data=answer)


def _asked(model, gpus, card, sharding, tensor, pipeline, micro_batch, sequence, recompute, code,
           expert):
    """(job, plan); data is what is left over of the GPUs."""
    data = max(1, gpus // (tensor * pipeline))
    each = data * micro_batch
    batch = max(1, TOKENS // sequence // each) * each
    base = CODE_BASES[code]
    job = Job(model, shape_named(model), sequence, batch, gpu(card), gpus, min(8, gpus),
              "bf16 policy" if code.startswith("PyTorch") else None, code=base)
    return job, Plan(data, tensor, pipeline, sharding=sharding, micro_batch=micro_batch,
                     recompute=recompute, expert=expert)


def _bars(answer) -> tuple[marks.LabelledBar, marks.LabelledBar]:
    _, most = answer.largest
    held = {name: size / GB for name, size in answer.held.by_name().items()}
    taken = {name: sum(getattr(answer.seconds, cause) for cause in of)
             for name, of in _TAKEN.items()}
    low, high = answer.memory_factors.of(most / GB)
    fast, slow = answer.seconds_factors.of(answer.seconds.total)
    return (marks.LabelledBar(held, f"{most / GB:.3g} GB", whisker=(low, high)),
            marks.LabelledBar(taken, f"{answer.seconds.total:.3g} s", whisker=(fast, slow),
                              colour=_WAITING))


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
    memory, seconds = answer.memory_factors.kind, answer.seconds_factors.kind
    kinds = memory if memory == seconds else f"memory: {memory}; seconds: {seconds}"
    return (f"The dashed line: {room:.3g} GB that CUDA and NCCL leave free. 80 % of measured runs "
            f"of this kind lie within the whiskers ({kinds}).")
