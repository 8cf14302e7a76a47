"""The seconds of a job's step on a node, by `labs.predictions.step_time`, in the four parts that
the table and the chart show."""

from dataclasses import dataclass

from labs.fsdp.node.jobs import Job
from labs.predictions.hardware import GPU, HOST_BANDWIDTH
from labs.predictions.step_time.constants import FITTED, NETWORK, Constants, generation
from labs.predictions.step_time.parts import parts_of
from labs.predictions.step_time.training_run import TrainingRun
from labs.training.models import VOCABULARY

NODE = 8  # GPUs that share a host, at least


@dataclass(frozen=True)
class Node:
    """GPUs that share a host. host_bandwidth: bytes/s of the host's memory, of all ranks together.
    constants: of the step-time model."""

    card: GPU
    host_bandwidth: float
    constants: Constants = FITTED

    @classmethod
    def of(cls, card: GPU) -> "Node":
        """Returns the node of NVIDIA's that has such cards."""
        return cls(card, HOST_BANDWIDTH[generation(card.name)])


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, one after the other. communication: of collectives, what computing does
    not hide, and by how much it slows down what does. host: copies that nothing hides, and AdamW on
    the host. copied: bytes over PCIe, of one rank, whether they are hidden or not."""

    computing: float
    communication: float
    optimizer: float
    host: float
    copied: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """Name of a part, as charts show it -> seconds."""
        return {"computing": self.computing, "exposed": self.communication,
                "optimizer": self.optimizer, "host": self.host}


def training_run(job: Job, node: Node) -> TrainingRun:
    """Returns the job as the step-time model knows it. Products of fp32 are in TF32."""
    size, ranks = job.size, job.size.ranks
    sharded = job.formula != "ddp"
    return TrainingRun(
        layers=size.layers, hidden=size.hidden, ffn=4 * size.hidden, heads=size.heads,
        kv_hidden=size.hidden, vocabulary=VOCABULARY, mlp_matrices=2, sequence=size.context,
        micro_batch=size.batch, accumulation=1, gpu=node.card, gpus=ranks,
        gpus_per_node=max(NODE, ranks), network=NETWORK[generation(node.card.name)],
        sharding=3 * sharded, shards=ranks if sharded else 1, reduce_bytes=4,
        param_bytes=2 if job.bf16 else 4, fp32=not job.bf16, recompute=job.checkpointing,
        early_stop=True, offload=job.offload, host_bandwidth=node.host_bandwidth / ranks)


def step_seconds(job: Job, node: Node) -> StepSeconds:
    """Returns what a step of the job takes on the node."""
    run = training_run(job, node)
    seconds = dict.fromkeys(("computing", "communication", "optimizer", "host"), 0.0)
    for part in parts_of(run, node.constants):
        name = ("optimizer" if part.name == "optimizer" and not job.offload else
                "host" if part.cause == "host" else
                "computing" if part.beside is None else "communication")
        seconds[name] += part.exposed(node.constants)
    return StepSeconds(**seconds, copied=copied_bytes(run))


def copied_bytes(run: TrainingRun) -> float:
    """Returns the bytes that offload moves over PCIe in a step and rank: a layer's shard for each
    of two gathers, the root's for one, and the gradients of both back. All in fp32."""
    layers = run.layers * run.layer_parameters
    return run.offload * 4 / run.shards * (3 * layers + 2 * run.embedding_parameters)


def communication_seconds(job: Job, node: Node) -> float:
    """Returns the seconds of all collectives of a step, hidden or not."""
    return sum(part.seconds for part in parts_of(training_run(job, node), node.constants)
               if part.beside is not None and part.cause != "host")
