"""Chooses backend, devices and number of ranks by what the machine has, and says why."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from unittest import mock

import torch

from labs.words import counted
from labs.workers import cuda
from labs.workers.cores import available

RANK_BYTES = 100_000_000  # of memory that a rank takes before it does anything
FILES_PER_RANK = 5  # that the caller keeps open for each rank
RANKS_PER_CORE = 64  # beyond so many, ranks time out before they all have met
CHOICES = (None, "cpu", "cuda")
_chosen: ContextVar[str | None] = ContextVar("device", default=None)


@dataclass(frozen=True)
class Plan:
    """Where the ranks of one launch run.

    ranks: world size. backend: what `init_process_group` gets. devices: one name per rank.
    threads: intra-op threads per rank. reason: one sentence for the student.
    """

    ranks: int
    backend: str
    devices: tuple[str, ...]
    threads: int
    reason: str

    @property
    def device(self) -> str:
        """What kind of device the ranks have: "cpu" or "cuda"."""
        return self.devices[0].partition(":")[0]

    @property
    def library(self) -> str:
        """What carries the tensors on these devices: "nccl" or "gloo"."""
        return "nccl" if "nccl" in self.backend else "gloo"


def cores() -> int:
    """Cores this process may use, also where others share the machine: see `labs.workers.cores`."""
    return available()


@contextlib.contextmanager
def on(device: str | None) -> Iterator[None]:
    """Inside the block, launches that name no device run on this one: "cpu", "cuda", or None for
    what the machine has. Raises ValueError for another name."""
    before = _chosen.set(_known(device))
    try:
        yield
    finally:
        _chosen.reset(before)


def gpus() -> int:
    """Returns the number of GPUs that launches use which name no device."""
    return 0 if _chosen.get() == "cpu" else cuda.count()


def are_shared(ranks: int) -> bool:
    """Returns whether so many ranks share GPUs, with gloo, in launches that name no device."""
    return 0 < gpus() < ranks


def send_recv_device(ranks: int) -> contextlib.AbstractContextManager:
    """Inside, what is launched on so many ranks can send and receive: where ranks share a GPU, they
    run on the CPU, because gloo sums and gathers GPU tensors, but cannot send them."""
    return on("cpu") if are_shared(ranks) else contextlib.nullcontext()


def default_ranks() -> int:
    """One rank per GPU where there are several; otherwise 2 to 4, by the number of cores."""
    return gpus() if gpus() > 1 else min(4, max(2, cores()))


def plan(ranks: int | None = None, device: str | None = None) -> Plan:
    """The plan for `ranks` ranks (None: what the machine offers) on `device` (cpu, cuda; None:
    that of `on`, or what the machine has). Raises TypeError or ValueError, with advice, where there
    can be none."""
    ranks = default_ranks() if ranks is None else _checked(ranks)
    device = _chosen.get() if _known(device) is None else device
    found = 0 if device == "cpu" else cuda.count()
    if device == "cuda" and not found:
        raise ValueError("device='cuda', but this machine has no usable GPU: leave device out")
    # torch's default is all cores for each rank: ranks would compete for them.
    threads = max(1, cores() // ranks)
    if not found:
        why = "as asked" if device == "cpu" else "no GPU here"
        return Plan(ranks, "gloo", ("cpu",) * ranks, threads,
                    f"ranks run on the CPU with gloo ({why}): bytes and calls are those of a "
                    "GPU node, seconds are not")
    devices = tuple(f"cuda:{rank % found}" for rank in range(ranks))
    if ranks <= found:
        # gloo in addition to NCCL, so that a CPU tensor can be communicated too
        return Plan(ranks, "cpu:gloo,cuda:nccl", devices, threads,
                    f"one GPU per rank with NCCL ({found} found)")
    return Plan(ranks, "gloo", devices, threads,
                f"{ranks} ranks share {counted(found, 'GPU')} with gloo, because NCCL "
                "before 2.30 refuses two ranks on one GPU")


def most_ranks() -> int:
    """The most ranks that can be started here: each takes memory, open files of this process, and
    time of a core while all ranks meet."""
    import psutil

    by_memory = int(psutil.virtual_memory().available / RANK_BYTES)
    return max(1, min(by_memory, _open_files() // FILES_PER_RANK, RANKS_PER_CORE * cores()))


def _open_files() -> int:
    """How many files this process may still open, after raising its limit to the system's."""
    try:
        import resource
    except ImportError:
        return 1_000_000
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 100_000) if most > 0
                                                        else 100_000, most))
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200, FILES_PER_RANK)


def oversubscription(ranks: int) -> str | None:
    """A warning when there are more ranks than this machine runs at a sensible speed, or None."""
    if ranks <= max(8, 4 * cores()):
        return None
    return (f"{ranks} ranks on {cores()} cores: it will work, but slowly, "
            "and each rank takes about 0.1 GB of memory")


def device() -> torch.device:
    """The device of this rank; outside of a launch, the CPU."""
    return torch.device(os.environ.get("LABS_DEVICE", "cpu"))


@contextlib.contextmanager
def meshes_on_cpu() -> Iterator[None]:
    """Inside the block `fully_shard` without a mesh shards on the CPU. By itself it takes the
    accelerator that torch was built for, also where its GPUs are hidden or missing, and then raises
    that there are none (torch 2.13, `_init_default_mesh`)."""
    with mock.patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cpu")):
        yield


def synchronize() -> None:
    """On a rank: waits until its device has done all that it was given. A CPU has."""
    if device().type == "cuda":
        cuda.synchronize()


def finish_computing() -> None:
    """On a rank: as `synchronize`, but collectives of NCCL that nobody has waited for continue:
    they have a stream of their own."""
    if device().type == "cuda":
        cuda.synchronize_stream()


def compute_deterministically() -> None:
    """On a rank: from now on, the same numbers give the same sums, to the last bit, where its
    device can. A CPU's do."""
    if device().type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True, warn_only=True)


def random_states() -> list[torch.Tensor]:
    """The states of torch's random generators that this rank draws from: the CPU's and, on a GPU,
    that GPU's, from which dropout draws there."""
    gpu = [cuda.random_state(str(device()))] if device().type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Puts back what `random_states` has returned, on a rank of the same kind."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        cuda.set_random_state(state, str(device()))


def rounding() -> int:
    """On a rank: returns the bytes by which its device's allocator may make a tensor larger."""
    return cuda.BLOCK - 1 if device().type == "cuda" else 0


def _known(device) -> str | None:
    if device not in CHOICES:
        raise ValueError(f"device={device!r}: choose 'cpu', 'cuda', or leave it out")
    return device


def _checked(ranks) -> int:
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"ranks={ranks!r}: give a whole number, for example ranks=4")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least 1 rank is needed")
    if ranks > 8 and ranks > most_ranks():
        raise ValueError(f"ranks={ranks} is more than this machine can run at once: at most "
                         f"{most_ranks()} ({cores()} cores; each rank takes about 0.1 GB of memory "
                         f"and {FILES_PER_RANK} open files)")
    return ranks
