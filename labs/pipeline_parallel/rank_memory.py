"""Exercise 7.24: the bytes of one rank under data, tensor and pipeline parallelism."""

from collections.abc import Callable

from matplotlib.patches import Patch

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import Mistake, common_cause, judge_number, require_named
from labs.checks.verdicts import check, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pipeline_parallel.choose_plan import GB
from labs.predictions.hardware import gpu, overhead
from labs.predictions.memory.parameters import Shape
from labs.predictions.plans.job import RECOMPUTE, Job, Plan
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.memory import in_flight, layer_activations, rank_memory

PARTS = ("parameters", "gradients", "optimizer state", "activations")
TOLERANCE = 2e-3  # relative: norms, which tensor parallelism does not cut, may be cut or left out
DRAWN = 4  # jobs that differ at each call
Case = tuple[Job, Plan, int]


def cases() -> list[Case]:
    """Jobs, plans and stages: with one stage and with many, fewer micro-batches than stages, one
    data-parallel rank and many. A tied model has at least two stages, so that the first and the
    last one have a matrix each."""
    large, seventy, small = JOBS["GPT-175B"], JOBS["Llama-3-70B"], JOBS["GPT-1.3B"]
    plans = [(large, Plan(32, 8, 12, micro_batch=micro_batch, recompute=recompute))
             for micro_batch, recompute in ((1, "selective"), (2, "full"), (48, "full"))]
    plans += [(large, Plan(64, 1, 48)), (seventy, Plan(64, 8, 1, recompute="none")),
              (seventy, Plan(8, 8, 8, recompute="none")),
              (seventy, Plan(32, 8, 2, recompute="none")),
              (small, Plan(1, 1, 8)), (small, Plan(2, 2, 2, micro_batch=4))]
    return _with_stages(plans)


def drawn_cases() -> list[Case]:
    """Jobs and plans of drawn sizes, others at each call, that no table lists."""
    rng, plans = new_generator(), []
    for _ in range(DRAWN):
        # wide enough for the norms to be less than TOLERANCE of a layer
        heads, stages, is_gpt = 8 * rng.randint(4, 16), rng.randint(2, 12), rng.random() < 0.5
        hidden, layers = 128 * heads, stages * rng.randint(1, 12)
        vocabulary, batches = 128 * rng.randint(250, 1200), rng.randint(1, 2 * stages)
        shape = (Shape("gpt2", hidden, layers, heads, heads, 128, 4 * hidden, vocabulary, 8192,
                       tied=True, qkv_bias=True, out_bias=True, mlp_bias=True) if is_gpt else
                 Shape("llama", hidden, layers, heads, 8, 128, 1024 * rng.randint(10, 60),
                       vocabulary))
        plan = Plan(rng.randint(2, 40), rng.choice((1, 2, 4, 8)), stages,
                    micro_batch=rng.randint(1, 4), recompute=rng.choice(RECOMPUTE))
        job = Job("a job of drawn sizes", shape, 1024 * rng.randint(1, 8),
                  plan.data * plan.micro_batch * batches, gpu("H100"), plan.gpus,
                  flash=rng.random() < 0.5)
        plans.append((job, plan))
    return _with_stages(plans)


def _with_stages(plans: list[tuple[Job, Plan]]) -> list[Case]:
    """The first stage of each plan, one in the middle, and the last."""
    return [(job, plan, stage) for job, plan in plans
            for stage in sorted({0, plan.pipeline // 2, plan.pipeline - 1})]


def _states(job, plan, stage, parameters: float, name: str) -> float:
    """Bytes of a part of the states, if the rank had so many parameters."""
    part = name.replace(" ", "_")
    cut = plan.data if name == "optimizer state" else 1  # ZeRO-1
    return getattr(job.bytes_per_parameter, part) * parameters / cut


def _state_mistakes(name) -> list[Mistake]:
    def of(parameters):
        return lambda case: _states(*case, parameters(*case), name)

    def layers(job, plan, stage):
        return plan.layers(job, stage) * job.layer_parameters / plan.tensor

    def embedding(job, plan):
        return job.embedding_parameters / plan.tensor

    found = [
        Mistake("embedding_head_missing", of(lambda job, plan, stage: layers(job, plan, stage)),
                "the embedding and the head are missing",
                "The first stage has the embedding, the last one the head."),
        Mistake("every_stage_embedding",
                of(lambda job, plan, stage: layers(job, plan, stage) + embedding(job, plan)),
                "every stage has the embedding", "Only the first and the last stage have one."),
        Mistake("every_stage_embedding_head",
                of(lambda job, plan, stage: layers(job, plan, stage) + 2 * embedding(job, plan)),
                "every stage has the embedding and the head",
                "A stage in the middle has layers only."),
        Mistake("tensor_parallelism_not_cut",
                of(lambda job, plan, stage: plan.tensor * layers(job, plan, stage)
                    + plan.tensor * embedding(job, plan) * _ends(job, plan, stage)),
                "tensor parallelism does not shard it",
                "Each tensor-parallel rank has 1/t of a matrix."),
        Mistake("pipeline_not_cut",
                of(lambda job, plan, stage: plan.pipeline * layers(job, plan, stage)
                    + embedding(job, plan) * _ends(job, plan, stage)),
                "the pipeline does not split it", "A stage has its own layers alone."),
        Mistake("evenly_divided",
                of(lambda job, plan, stage: (plan.pipeline * layers(job, plan, stage)
                    + 2 * embedding(job, plan)) / plan.pipeline),
                "all parameters divided evenly by t · p",
                "The embedding and the head are on the first and the last stage alone.")]
    if name == "optimizer state":
        found.append(Mistake("zero_1_not_cut",
                             lambda case: case[1].data * _states(*case, _own(*case), name),
                             "ZeRO-1 does not shard it",
                             "ZeRO-1 divides it by the number of data-parallel ranks."))
    else:
        found.append(Mistake("cut_over_data_parallel_ranks",
                             lambda case: _states(*case, _own(*case), name) / case[1].data,
                             "sharded over the data-parallel ranks", "ZeRO-1 shards only the "
                             "optimizer state."))
    return found


def _ends(job, plan, stage) -> int:
    """How many matrices of the size of the embedding a stage has."""
    return (stage == 0) + (stage == plan.pipeline - 1)


def _own(job, plan, stage) -> float:
    return (plan.layers(job, stage) * job.layer_parameters
            + _ends(job, plan, stage) * job.embedding_parameters) / plan.tensor


def _activations(count) -> Callable:
    return lambda case: (case[1].layers(case[0], case[2]) * layer_activations(*case[:2])
                         * count(*case))


_ACTIVATIONS: list[Mistake] = [
    Mistake("one_micro_batch", _activations(lambda job, plan, stage: 1), "those of one micro-batch",
            "1F1B keeps several micro-batches in flight."),
    Mistake("all_micro_batches", _activations(lambda job, plan, stage: plan.micro_batches(job)),
            "those of all micro-batches, as GPipe keeps them",
            "1F1B begins backward as soon as it can."),
    Mistake("p_micro_batches_on_stage", _activations(lambda job, plan, stage: plan.pipeline),
            "p micro-batches on each stage",
            "The last stage keeps one: its backward follows its forward at once."),
    Mistake("more_micro_batches_than_step",
            _activations(lambda job, plan, stage: plan.pipeline - stage),
            "more micro-batches than the step has",
            "There are never more in flight than micro-batches."),
    Mistake("one_micro_batch_too_few",
            _activations(lambda job, plan, stage:
                         min(plan.pipeline - stage - 1, plan.micro_batches(job))),
            "one micro-batch too few in flight",
            "The one whose backward begins is still kept: the last stage keeps one."),
    Mistake("one_micro_batch_too",
            _activations(lambda job, plan, stage:
                         min(plan.pipeline - stage + 1, plan.micro_batches(job))),
            "one micro-batch too many in flight",
            "The last stage keeps one: its backward follows its forward at once."),
    Mistake("stages_counted_from_end",
            _activations(lambda job, plan, stage: min(stage + 1, plan.micro_batches(job))),
            "the stages counted from the end", "Stage 0 keeps most."),
    Mistake("one_layer",
            lambda case: layer_activations(*case[:2]) * in_flight(case[1], case[0], case[2]),
            "those of one layer", "A stage has several layers."),
    Mistake("all_layers", lambda case: case[0].shape.layers * layer_activations(*case[:2])
                * in_flight(case[1], case[0], case[2]), "those of all layers",
            "A stage has L/p layers.")]


def _units(name) -> list[Mistake]:
    return [Mistake("wrong_unit", lambda case, unit=unit: rank_memory(*case)[name] / unit,
                    f"that is in {words}", "Return bytes.")
            for unit, words in ((1e9, "GB"), (2**30, "GiB"))]


MISTAKES: dict[str, list[Mistake]] = {name: [*found, *_units(name)] for name, found in (
    *((name, _state_mistakes(name)) for name in PARTS[:3]), ("activations", _ACTIVATIONS))}


@check("7.24")
def check_rank_memory(rank_memory_of: Callable):
    """rank_memory_of(job, plan, stage) -> the bytes of PARTS, of one rank of a stage."""
    known = cases()
    tried = [*known, *drawn_cases()]
    answers = [require_named(rank_memory_of(*case), PARTS, _named(*case)) for case in tried]
    for at, case in enumerate(tried):
        want = rank_memory(*case)
        for name in PARTS:
            # All answers first: a mistake is named if it explains every case, and not one by
            # chance.
            found = [answer[name] for answer in answers]
            judge_number(found[at], want[name],
                         common_cause(MISTAKES[name], tried, found, at, TOLERANCE),
                         f"{_named(*case)}: {name}", "bytes", rel_tol=TOLERANCE)
    return (f"right for {len(known)} ranks: from one GPU's to those of 175B parameters on 3,072, "
            "by part; and for those of drawn jobs")


def _named(job, plan, stage) -> str:
    return f"{job.name}, {plan}, stage {stage} of {plan.pipeline}"


COLOURS = {**{name: palette.MEMORY[name] for name in PARTS}, "logits": palette.MEMORY["buffers"]}


@shows("7.24")
def show_stages(rank_memory_of: Callable, job: Job, plan: Plan) -> Picture:
    """Draws the bytes of one rank of each pipeline stage, by the student's function, in parts, the
    logits of the last stage, and what the GPU has."""
    parts = [require_named(rank_memory_of(job, plan, stage), PARTS, f"stage {stage}")
             | {"logits": rank_memory(job, plan, stage)["logits"]}
             for stage in range(plan.pipeline)]
    guess = guessed("7.24")
    figure, ax = canvas(WIDTH, 3.6 + marks.HEADLINE + marks.NOTE_LINE * (1 + (guess is not None)))
    bottoms = [0.0] * plan.pipeline
    for name in COLOURS:
        heights = [found[name] / GB for found in parts]
        ax.bar(range(plan.pipeline), heights, 0.72, bottoms, color=COLOURS[name])
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    for stage, total in enumerate(bottoms):
        ax.text(stage, total, f"{total:.1f}", ha="center", va="bottom", fontsize=9)
    limit = (job.gpu.usable - overhead(job.gpus)) / GB
    if limit < 3 * max(bottoms):
        ax.axhline(limit, color=palette.RANK_FAILED, linewidth=1)
    handles = [Patch(color=COLOURS[name], label=name) for name in COLOURS]
    if guess is not None:
        handles.append(ax.hlines(guess, -0.5, 0.5, color=palette.GUESSED, linestyle=(0, (3, 2)),
                                 label="your guess for stage 0"))
    ax.set(xlabel="pipeline stage", ylabel="GB of a rank", xticks=range(plan.pipeline))
    ax.margins(y=0.12)
    worst = bottoms.index(max(bottoms))
    lesson = (f"Stage {worst} needs most: {bottoms[worst]:.1f} of {limit:.1f} GB, "
              f"{bottoms[worst] / min(bottoms):.2f} times as much as the stage that needs least")
    answer = marks.answered(guess, bottoms[0], "GB on stage 0")
    marks.headline(figure, lesson)
    marks.legend_above(figure, handles)
    marks.note_below(figure, "\n".join([*filter(None, [answer]), f"{job}:", f"{plan}"]))
    words = [f"stage {stage}: {total:.1f} GB, of them " + ", ".join(
        f"{name} {found[name] / GB:.1f}" for name in COLOURS)
        for stage, (total, found) in enumerate(zip(bottoms, parts, strict=True))]
    return Picture(figure, "\n".join([lesson, *words, *filter(None, [answer])]), data=parts)
