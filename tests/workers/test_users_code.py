"""What users' own code expects of a rank: torchrun's variables, pickle, process groups, rpc."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import labs
from labs import launch

pytestmark = pytest.mark.usefixtures("nothing_left")

SCRIPT = """
import collections, dataclasses, enum, io, multiprocessing, pickle, torch
import torch.distributed as dist
from labs import launch
SHIFT = 3
@dataclasses.dataclass
class Result:
    rank: int
class Colour(enum.Enum):
    RED = 1
class Outer:
    class Inner: pass
Pair = collections.namedtuple("Pair", "a b")
def shifted(x):
    return x * x + SHIFT
def work():
    results = [None] * 2
    dist.all_gather_object(results, Result(dist.get_rank()))
    file = io.BytesIO()
    torch.save({"colour": Colour.RED, "pair": Pair(1, 2), "function": shifted}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    with multiprocessing.Pool(2) as pool:
        mapped = pool.map(shifted, [1, 2])
    inner = type(pickle.loads(pickle.dumps(Outer.Inner()))) is Outer.Inner
    return results, saved, mapped, inner
results, saved, mapped, inner = launch(work, ranks=2, quiet=True)[1]
print(results == [Result(0), Result(1)], saved["colour"] is Colour.RED, saved["pair"] == Pair(1, 2))
print(saved["function"](2), mapped, inner)
"""


@pytest.mark.slow
def test_what_a_script_defines_can_be_pickled_on_a_rank(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True,
                          timeout=120)
    assert done.stdout == "True True True\n7 [4, 7] True\n", done.stderr


HELPERS = """
import functools, torch, weakref
from torch.autograd.function import once_differentiable
from labs import launch
@functools.cache
def doubled(n):
    return 2 * n
@functools.singledispatch
def kind(x):
    return "object"
@kind.register
def _(x: int):
    return "int"
class Layer:
    @functools.lru_cache(maxsize=2)
    def tripled(self, n):
        return 3 * n
    @functools.cached_property
    def size(self):
        return [4]
class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 2 * gradient
@torch.inference_mode()
def measured(x):
    return x.is_inference(), torch.is_inference_mode_enabled()
seen = weakref.WeakKeyDictionary()
def work():
    x = torch.ones(1, requires_grad=True)
    Doubles.apply(x).backward()
    layer = Layer()
    seen[layer] = doubled(4)
    return [doubled(4), doubled.cache_info().misses, layer.tripled(2), layer.size is layer.size,
            x.grad.item(), measured(torch.ones(1)), kind(1), kind("1"), len(seen)]
print(launch(work, ranks=1, quiet=True)[0])
"""


@pytest.mark.slow
def test_the_ordinary_helpers_of_a_script_reach_the_ranks(tmp_path):
    (tmp_path / "script.py").write_text(HELPERS)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True,
                          timeout=120)
    assert done.stdout == ("[8, 1, 6, True, 2.0, (False, True), 'int', 'object', 1]\n"
                           ), done.stderr


def listening() -> list[str]:
    """The addresses on which this process listens."""
    import psutil

    return [connection.laddr.ip for connection in psutil.Process().net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN]


def test_the_variables_of_torchrun(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")  # of an outer job: its port is not the ranks'

    def work():
        import os

        names = ("MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                 "GROUP_RANK", "ROLE_RANK")
        return [os.environ[name] for name in names], int(os.environ["MASTER_PORT"])

    first, second = launch(work, ranks=2, quiet=True)
    assert first[0] == ["127.0.0.1", "0", "0", "2", "2", "0", "0"]
    assert second[0] == ["127.0.0.1", "1", "1", "2", "2", "0", "1"]
    assert first[1] == second[1] >= 1024


def test_accelerate_and_trainer_see_all_ranks_on_the_cpu():
    """Without being told to use the CPU, both take each rank for a job of its own, silently."""
    def work():
        from accelerate import Accelerator
        from transformers import TrainingArguments

        accelerator = Accelerator()
        gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        return gathered, TrainingArguments("unused", report_to=[]).world_size

    assert launch(work, ranks=2, device="cpu", quiet=True) == [([0, 1], 2)] * 2
    alone = launch(work, ranks=2, device="cpu", quiet=True,
                   environment={"ACCELERATE_USE_CPU": "false"})
    assert alone == [([0], 1)] * 2  # what the user sets is kept


def test_a_second_process_group_is_refused_in_a_sentence():
    with pytest.raises(labs.RankFailed, match="launch has initialized the process group of 2 ranks "
                                              "already: leave init_process_group out"):
        launch(lambda: dist.init_process_group("gloo"), ranks=2, quiet=True)


def test_a_store_of_ones_own_and_rpc_listen_on_loopback_alone():
    def work():
        import os

        import torch.distributed.rpc as rpc

        rank, port = dist.get_rank(), int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        store.set(f"rank {rank}", "here")
        store.wait([f"rank {1 - rank}"])
        dist.barrier()
        del store
        dist.barrier()  # or rank 1 reaches the store that rank 0 is about to close
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        answer = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank))
        found = set(listening())
        rpc.shutdown()
        return answer.tolist(), found

    assert launch(work, ranks=2, quiet=True, timeout=60) == [([1.0, 1.0], {"127.0.0.1"}),
                                                             ([2.0, 2.0], {"127.0.0.1"})]


def test_the_process_group_can_be_made_anew():
    def work():
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.barrier()
        return total.item(), set(listening())

    assert launch(work, ranks=2, quiet=True) == [(2.0, {"127.0.0.1"})] * 2
