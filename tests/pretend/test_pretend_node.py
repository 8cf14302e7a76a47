"""What the pretend node's README promises, row by row. `facts.py` looks, in few processes."""

import ctypes
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pretend import node

sys.path += node.PATH
from pretend_gpus import machine, private  # noqa: E402

FACTS = str(node.HERE / "facts.py")
BYTES = 4 * 300 * 1024  # of facts.SIZE numbers in fp32
CONTEXT = 480 * 2**20
GIB = 2**30


def output(command, environment, seconds=120) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=node.ROOT,
                          env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@functools.cache
def one() -> dict:
    """facts.one() on two A100."""
    return json.loads(output([sys.executable, FACTS, "one"], node.environment(2)).splitlines()[-1])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """facts.ranks() of the two ranks that torchrun started."""
    folder = tmp_path_factory.mktemp("ranks")
    output([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            FACTS, "ranks", str(folder)], node.environment(2))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_devices():
    found = one()["devices"]
    assert (found["before"], found["available"], found["nccl"]) == (False, True, True)
    assert (found["count"], found["name"]) == (2, "NVIDIA A100-SXM4-80GB")
    assert found["total"] == round(79.25 * GIB) and found["capability"] == [8, 0] and found["bf16"]
    assert found["peers"] == [True, False] and found["accelerator"] == "cuda"
    assert found["third"].startswith("AcceleratorError: CUDA error: invalid device ordinal")


@pytest.mark.parametrize("gpus, kind, name, capability", [
    ("1", "", "Tesla T4", (7, 5)), ("2", "", "NVIDIA A100-SXM4-80GB", (8, 0)),
    ("1", "H100", "NVIDIA H100 80GB HBM3", (9, 0))])
def test_kinds_of_gpus(monkeypatch, gpus, kind, name, capability):
    monkeypatch.setenv("PRETEND_GPUS", gpus)
    monkeypatch.setenv("PRETEND_GPU", kind)
    monkeypatch.setenv("PRETEND_GPU_BYTES", "2e8")
    assert (machine.kind().name, machine.kind().capability) == (name, capability)
    assert machine.total() == 200_000_000


def test_visible_devices_are_followed(monkeypatch):
    monkeypatch.setenv("PRETEND_GPUS", "4")
    for visible, count in (("0,1,2,3", 4), ("3", 1), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.count() == count
    assert "CUDA_VISIBLE_DEVICES" not in node.environment(4)


def test_nvidia_smi(tmp_path):
    def smi(*arguments, kind=None):
        return output(["nvidia-smi", *arguments], node.environment(2, kind, TMPDIR=str(tmp_path)))

    query = "--query-gpu=name,memory.total,memory.used"
    assert smi(query, "--format=csv,noheader,nounits").splitlines() == [
        "NVIDIA A100-SXM4-80GB, 81920, 0"] * 2
    assert smi("topo", "-m", kind="H100").splitlines()[1:3] == [
        "GPU0\t X \tNV18\t0-1\t0", "GPU1\tNV18\t X \t0-1\t0"]


def test_tensors_say_where_they_are():
    found = one()["tensors"]
    assert found["devices"] == {**dict.fromkeys(found["devices"], "cuda:0"), "here": "cpu",
                                "second": "cuda:1"}
    assert found["is_cuda"] == [True, False]
    assert found["values"] == [1, 1, 1]  # copied before it changed on the CPU
    assert found["stays"] and found["file"] and found["autocast"] == "torch.bfloat16"


def test_streams_and_events():
    found = one()["streams_and_events"]
    assert found["inside"] and found["outside"] and found["query"]
    assert found["milliseconds"] >= 50 and found["slept"] >= 0.02
    assert "enable_timing=True" in found["untimed"]


def test_random_numbers():
    assert one()["random_numbers"] == {"seed": True, "state": True}


def test_memory_is_that_of_the_tensors():
    found = one()["memory"]
    assert (found["held"], found["peak"], found["other"]) == (BYTES, 3 * BYTES, 0)
    assert found["reserved"] == 2 * 2**21 >= found["peak"]  # whole segments
    assert found["used"] == CONTEXT + found["reserved"] and found["stats"]
    assert found["after"] == 0  # all of it came back
    assert BYTES <= found["backward"] < BYTES + 2**16  # autograd's own thread is counted


def test_memory_of_the_host_is_not_the_gpus():
    found = one()["memory"]
    assert found["on host"] == 0 and found["is pinned"] == [True, False, "cpu"]
    assert found["pinned"] == 2**21  # the next power of two


def test_errors_are_cudas():
    found = one()["errors"]
    assert found["position"].startswith("AcceleratorError: CUDA error: device-side assert")
    assert found["number"].startswith("IndexError")  # of Python's, no kernel runs
    assert found["larger"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 93")
    assert "Invalid fraction" in found["fraction"]


def test_a_limit_holds():
    found = one()["errors"]
    for words in ("OutOfMemoryError: CUDA out of memory. Tried to allocate 381.47 MiB",
                  "95.37 MiB allowed"):
        assert words in found["limit"]
    assert found["below"] == "returned (1000,)"


def test_profiler_and_trace():
    found = one()["profiled"]
    assert found["devices"] == ["cuda:0"]
    assert "ampere_sgemm_128x64_tn" in found["kernels"]
    assert found["streams"] == [7] and found["joined"]


def test_fake_tensors_have_a_backward():
    assert one()["fake_tensors"]["devices"] == ["cuda:0", "cuda:0", "cpu"]


def test_presets_are_those_of_a_node_and_small():
    found = one()["sizes"]
    assert found["name"] == "node" and found["layers"] <= 3 and found["hidden"] <= 64
    assert found["laptop"] > 64  # as it is


@pytest.mark.slow
def test_nccl_is_gloo_by_another_name(ranks):
    for rank, found in enumerate(ranks):
        assert (found["backend"], found["group"]) == ("nccl", "nccl")
        assert found["sums"] == [[3, 3], [1, 1, 2, 2], [2 + 2 * rank] * 2, f"cuda:{rank}"]
        assert found["drawn"] and found["shard"] == [f"cuda:{rank}", [4, 8]]


@pytest.mark.slow
def test_traces_of_ranks_have_nccls_kernels(ranks):
    for found in ranks:
        trace = found["trace"]
        names = {name.split("(")[0] for name in trace["kernels"]}
        assert {"ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllGather_RING_LL",
                "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"} < names
        assert trace["streams"] == [7, 20] and trace["joined"] and trace["gloo"] == []


@pytest.mark.slow
def test_a_gpu_has_one_rank(ranks):
    assert ranks[0]["another's"] == "returned None"
    assert ranks[1]["another's"].startswith("DistBackendError: NCCL error")
    assert "Duplicate GPU detected : rank 1 and rank 0" in ranks[1]["another's"]


KERNEL = """
import os, torch, labs
def where():
    return f"{torch.cuda.get_device_name()} {labs.device()} {torch.distributed.get_backend()}"
print(torch.cuda.device_count(), "in the kernel;", *labs.launch(where, ranks=2, quiet=True))
"""


@pytest.mark.gate  # a kernel, its fork server and ranks: what a solution on the node needs
@pytest.mark.slow
def test_a_kernel_its_fork_server_and_their_ranks_are_reached():
    from notebook_kernel import Kernel

    kernel = Kernel(**node.environment(2))
    try:
        shown, error = kernel.run(KERNEL)
    finally:
        kernel.close()
    assert error is None, error
    name = "NVIDIA A100-SXM4-80GB"
    assert (f"2 in the kernel; {name} cuda:0 cpu:gloo,cuda:nccl "
            f"{name} cuda:1 cpu:gloo,cuda:nccl") in shown


# Another torch


class Library:
    """Stands for libc10.so; an allocation changes the numbers at these places."""

    def __init__(self, *places):
        self.words = (ctypes.c_size_t * 40)()

        def add(sign):
            def report(reporter, block, nbytes=private._TRIED):
                for place in places:
                    self.words[place] += sign * nbytes
            return report

        self._ZN3c1025profiledCPUMemoryReporterEv = lambda: ctypes.addressof(self.words)
        self._ZN3c1025ProfiledCPUMemoryReporter3NewEPvm = add(1)
        self._ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv = add(-1)


@pytest.mark.parametrize("places", [(), (3, 5)])
def test_a_count_that_is_not_found_is_a_sentence(monkeypatch, places):
    monkeypatch.setattr(private, "_libc10", lambda: Library(*places))
    monkeypatch.setattr(private, "_switch", lambda library, name: None)
    with pytest.raises(private.AnotherTorch, match="not work with torch .* on .*: c10's count"):
        private.live_bytes()


def test_a_count_is_found_wherever_it_is(monkeypatch):
    library = Library(17)
    monkeypatch.setattr(private, "_libc10", lambda: library)
    monkeypatch.setattr(private, "_switch", lambda library, name: None)
    library.words[17] = 5
    found = private.live_bytes()
    assert found.value == 5 and ctypes.addressof(found) == ctypes.addressof(library.words) + 17 * 8


def test_a_torch_without_these_objects_is_a_sentence(monkeypatch):
    monkeypatch.setattr(private, "_libc10", lambda: ctypes.CDLL(None))  # the C library
    for look, words in ((private.live_bytes, "c10 has no FLAGS_caffe2"),
                        (private.link_guard, "c10 has no registry of device guards"),
                        (private.default_allocator, "c10 has no .*GetDefaultCPUAllocator")):
        with pytest.raises(private.AnotherTorch, match=words):
            look()
    monkeypatch.undo()
    monkeypatch.setattr(private.sys.modules["torch._C"], "__file__", "/nowhere/_C.so")
    with pytest.raises(private.AnotherTorch, match="libc10.so is not there, as it is on Linux"):
        private.link_guard()


def test_another_architecture_is_a_sentence(monkeypatch):
    monkeypatch.setattr(private.platform, "machine", lambda: "aarch64")
    with pytest.raises(private.AnotherTorch, match="on .* aarch64: the allocator's function is"):
        private.default_allocator()


def test_its_sentence_ends_the_import_of_torch():
    code = ("import ctypes; from pretend_gpus import private; "
            "private._libc10 = lambda: ctypes.CDLL(None); import torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=node.environment(1))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert "AnotherTorch: The pretend node does not work with torch" in last
    named = Path(last.split(" in ")[-1].rstrip("."))
    assert "What it takes of torch's inside" in last
    assert "## What it takes of torch's inside" in (node.ROOT / named).read_text()
