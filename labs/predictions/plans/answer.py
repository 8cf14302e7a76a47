"""What a job takes by a plan: memory by stage, seconds by cause, dollars, and how sure it is."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from labs.predictions import hardware
from labs.predictions.cost.prices import MACHINES, Machine
from labs.predictions.memory.parameters import active_count
from labs.predictions.plans.exact import counted_memory, is_countable
from labs.predictions.plans.intervals import COUNTED, Factors, memory_factors, seconds_factors
from labs.predictions.plans.job import Job, Plan, impossible
from labs.predictions.plans.memory import fits, largest_rank, rank_memory
from labs.predictions.plans.search import has_settings, plans, step_parts
from labs.predictions.step_time import StepTime
from labs.predictions.step_time.efficiency import flops_per_token, utilization
from labs.training.memory_categories import Memory

LAUNCH_BOUND = 0.2  # share of the step that the GPU waits for the host to start kernels
NAMES = {"matmul": "matrix products", "attention": "attention", "memory": "memory traffic",
         "tensor": "tensor-parallel collectives", "context": "keys and values sent",
         "sharding": "parameters gathered, gradients reduced",
         "all_reduce": "gradients all-reduced",
         "pipeline": "activations sent on", "bubble": "the pipeline's bubble",
         "host": "copies and AdamW on the host", "launch": "the host starting kernels",
         "stall": "stalls of the pipeline", "expert": "tokens sent to experts"}
"""Cause of seconds, as `StepTime` names it -> in words."""
_CATEGORIES = {"gathered parameters": "buffers", "unsharded gradients": "gradients",
               "logits": "activations"}  # part of the closed form -> name in a `Memory`


@dataclass(frozen=True)
class Answer:
    """job, plan: what was asked. counts_tensors: whether memory is counted tensor by tensor where
    that is possible, which takes some seconds at first; else by the closed form. All sizes in
    bytes, all times in seconds."""

    job: Job
    plan: Plan
    counts_tensors: bool = True

    @property
    def counted(self) -> Memory | None:
        """Bytes of a rank by category, every tensor counted; None where the closed form answers."""
        return counted_memory(self.job, self.plan) if self.counts_tensors else None

    @property
    def could_count(self) -> bool:
        """Whether the closed form answers a question for which tensors could be counted."""
        return not self.counts_tensors and is_countable(self.job, self.plan)

    @cached_property
    def stages(self) -> dict[int, dict[str, float]]:
        """Pipeline stage -> part -> bytes at the peak of one of its ranks."""
        if self.counted:
            return {0: {part: size for part, size in self.counted.by_name().items() if size}}
        return {stage: {part: size for part, size in rank_memory(
            self.job, self.plan, stage).items() if size} for stage in range(self.plan.pipeline)}

    @property
    def largest(self) -> tuple[int, float]:
        """(stage, bytes) of the rank that holds most."""
        if self.counted:
            return 0, self.counted.total
        stage, parts = largest_rank(self.job, self.plan)
        return stage, sum(parts.values())

    @property
    def held(self) -> Memory:
        """Bytes of the rank that holds most, by category: logits are activations, and gathered
        parameters are buffers of communication."""
        if self.counted:
            return self.counted
        found = dict.fromkeys(vars(Memory()), 0.0)
        for part, size in self.stages[self.largest[0]].items():
            found[_CATEGORIES.get(part, part).replace(" ", "_")] += size
        return Memory(**found)

    @property
    def overhead(self) -> float:
        """Bytes that CUDA and NCCL take beside tensors."""
        return hardware.overhead(self.job.gpus)

    @property
    def is_feasible(self) -> bool:
        """Whether the largest rank fits."""
        if self.counted:
            return hardware.fits(self.counted.total, self.job.gpu, self.job.gpus)
        return fits(self.job, self.plan)

    @property
    def surely_fits(self) -> bool:
        """Whether the upper end of the interval fits."""
        _, high = self.memory_factors.of(self.largest[1])
        return high + self.overhead <= self.job.gpu.usable

    @cached_property
    def seconds(self) -> StepTime:
        """Seconds of a step by cause."""
        return step_parts(self.job, self.plan)

    @property
    def memory_factors(self) -> Factors:
        """How far measured memory was from such a prediction."""
        return COUNTED if self.counted else memory_factors(self.job, self.plan)

    @property
    def seconds_factors(self) -> Factors:
        """How far measured seconds were from such a prediction."""
        return seconds_factors(self.job, self.plan)

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.job.batch * self.job.sequence / self.seconds.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1: 6N + 12·L·h·s FLOPs per token."""
        shape = self.job.shape
        flops = flops_per_token(active_count(shape), shape.layers, shape.hidden, self.job.sequence)
        return utilization(flops, self.tokens_per_s / self.job.gpus, self.job.gpu.flops)

    @property
    def is_launch_bound(self) -> bool:
        """Whether the GPU waits for the host in a fifth of the step or more."""
        return self.seconds.launch >= LAUNCH_BOUND * self.seconds.total

    @property
    def machine(self) -> Machine | None:
        """The cheapest machine to rent with the job's GPU, on demand; None where none is known."""
        known = [machine for machine in MACHINES.values() if machine.gpu == self.job.gpu.name]
        return min(known, key=lambda machine: machine.dollars, default=None)

    @property
    def dollars_per_step(self) -> float | None:
        """Of all GPUs, at the machine's price; None where there is none."""
        return self.machine and (
            self.machine.dollars * self.job.gpus * self.seconds.total / 3600)

    def causes(self) -> list[tuple[str, float]]:
        """(cause in words, seconds), the longest first, of those that take a hundredth or more."""
        found = [(NAMES[name], value) for name, value in vars(self.seconds).items()
                 if value >= 0.01 * self.seconds.total]
        return sorted(found, key=lambda one: -one[1])

    def as_json(self) -> dict:
        """Everything, in bytes, seconds, dollars and shares."""
        stage, most = self.largest
        low, high = self.seconds_factors.of(self.seconds.total)
        least, greatest = self.memory_factors.of(most)
        return {
            "plan": vars(self.plan), "fits": self.is_feasible,
            "memory": {"stages": self.stages, "counted": self.counted is not None,
                       "largest_stage": stage, "largest": most,
                       "low": least, "high": greatest, "cuda_and_nccl": self.overhead,
                       "card": self.job.gpu.usable, "rows": self.memory_factors.kind},
            "seconds": {"total": self.seconds.total, "causes": vars(self.seconds), "low": low,
                        "high": high, "rows": self.seconds_factors.kind},
            "tokens_per_s": self.tokens_per_s, "mfu": self.mfu,
            "launch_bound": self.is_launch_bound, "dollars_per_step": self.dollars_per_step,
            "machine": self.machine and self.machine.name, "command": command(self.job, self.plan)}


def command(job: Job, plan: Plan) -> str:
    """The command line that trains by this plan with the workbook's script, on each node; empty
    where that script has no such plan."""
    if plan.gpus != plan.data or job.shape.is_mixture or plan.sharding not in ("DDP", "FSDP"):
        return ""
    nodes = -(-job.gpus // job.gpus_per_node)
    local = min(job.gpus, job.gpus_per_node)
    where = "--standalone" if nodes == 1 else (
        f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500")
    return (f"torchrun {where} --nproc-per-node {local} solutions/scripts/train.py "
            f"--strategy {plan.sharding.lower()} --batch {plan.micro_batch} "
            f"--layers {job.shape.layers} --hidden {job.shape.hidden}")


def fastest_answers(job: Job, settings: Mapping[str, object], count: int = 3,
                    counts_tensors: bool = True) -> list[Answer]:
    """The fastest plans that fit and have these settings, no two of one kind: of one sharding, and
    both with or both without tensor, pipeline and context parallelism. Those come first whose whole
    interval fits: nine of ten jobs of the kind held less than its upper end. counts_tensors: as in
    an `Answer`, by whose number each of them fits."""
    timed = sorted(((step_parts(job, plan).total, number, plan)
                    for number, plan in enumerate(plans(job, settings.get("expert", 0)))
                    if has_settings(plan, settings)),
                   key=lambda one: one[:2])
    answers = [Answer(job, plan, counts_tensors) for _, _, plan in timed]
    surely = _different(answers, lambda answer: answer.surely_fits)
    return list(islice(surely, count)) or list(islice(
        _different(answers, lambda answer: answer.is_feasible), count))


def _different(answers: Iterable[Answer], is_wanted: Callable[[Answer], bool]) -> Iterator[Answer]:
    """The first of each kind that is wanted."""
    seen = set()
    for answer in answers:
        plan = answer.plan
        key = plan.sharding, plan.tensor > 1, plan.pipeline > 1, plan.context > 1
        # asking may count tensors, so a kind that was found is not asked for again
        if key not in seen and is_wanted(answer):
            seen.add(key)
            yield answer


def one_answer(job: Job, plan: Plan, counts_tensors: bool = True) -> Answer:
    """The answer for one plan. Raises ValueError, in a sentence, where it cannot be run."""
    if reason := impossible(job, plan):
        raise ValueError(reason)
    return Answer(job, plan, counts_tensors)
