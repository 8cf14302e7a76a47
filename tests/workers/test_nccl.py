"""What the launcher makes of NCCL's flight recorder, words and deaths, without a GPU: dumps of the
recorder are shaped as torch 2.13 writes them (FlightRecorderDetail.hpp), the words are torch's."""

import ctypes
import os
import pickle
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from labs import OutOfMemory, RankFailed, RanksStuck, launch
from labs.workers import (
    collective_matching,
    flight_recorder,
    hang_rules,
    heartbeat,
    memory,
    nccl,
    source_lines,
)
from labs.workers.heartbeat import Progress
from labs.workers.outcomes import Kind, Outcome, describe
from labs.workers.rank_handle import RankHandle

REMOTE = """\
[rank0]:[E1003 18:37:01.838 ProcessGroupNCCL.cpp:2059] [PG ID 0 PG GUID 0(default_pg) Rank 0] \
Process group watchdog thread terminated with exception: NCCL error: remote process exited or \
there was a network error, NCCL version 2.27.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
prematurely.
Last error:
socketProgress: Connection closed by remote peer node<41234>
terminate called after throwing an instance of 'c10::DistBackendError'
"""
ASSERT = ("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously "
          "reported at some other API call")
DUPLICATE = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with \
NCCL_DEBUG=WARN for details), NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"""
NO_ROOM = """\
NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details)
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
FULL_SHM = """\
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device \
error. It can be also caused by unexpected exit of a remote peer.
Last error:
Error while creating shared memory segment /dev/shm/nccl-xxxxxx (size 9637888)"""


def entry(number=1, name="nccl:all_reduce", state="started", group=0, record=0, **changes):
    """A collective in a dump, with all its fields."""
    return {"record_id": record, "pg_id": group, "process_group": (str(group), "default_pg"),
            "thread_name": "python", "thread_id": "1", "collective_seq_id": number,
            "p2p_seq_id": 0, "op_id": number, "profiling_name": name,
            "time_created_ns": 1_700_000_000_000_000_000 + record, "input_sizes": [[2]],
            "input_dtypes": ["Float"], "output_sizes": [[2]], "output_dtypes": ["Float"],
            "state": state, "time_discovered_started_ns": 1 if state != "scheduled" else None,
            "time_discovered_completed_ns": 2 if state == "completed" else None,
            "retired": state == "completed", "timeout_ms": 86_400_000, "is_p2p": False, **changes}


def dump(*entries):
    """A function like torch's _dump_nccl_trace."""
    def dumped(collectives, stacks, only_active):
        assert not stacks
        kept = [e for e in entries if not only_active or e["state"] != "completed"]
        status = {"0": {"last_enqueued_collective": len(entries), "last_started_collective": 0,
                        "last_completed_collective": len(entries) - len(kept)}}
        return pickle.dumps({"version": "2.10", "pg_config": {}, "comm_lib_version": "2.27.5",
                             "pg_status": status, **({"entries": kept} if collectives else {})}, 2)

    return dumped


@pytest.fixture
def recorded(monkeypatch):
    """Gives this process a flight recorder of NCCL with some collectives, by themselves."""
    def record(*entries, timed=True):
        monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1" if timed else "0")
        monkeypatch.setattr(c10d, "_dump_nccl_trace", dump(*entries), raising=False)
        monkeypatch.setattr(c10d, "_dump_fr_trace", dump(), raising=False)

    return record


# the flight recorder


def test_what_occupies_the_gpu_is_what_a_rank_waits_in(recorded):
    done, waits = entry(1, state="completed"), entry(2, "nccl:_all_gather_base", record=1)
    queued = entry(3, state="scheduled", record=2)
    other = entry(1, state="scheduled", group=1, record=-1)
    recorded(other, done, queued, waits)
    pending = flight_recorder.oldest_pending()
    assert (flight_recorder.name(pending), flight_recorder.number(pending)) == ("all_gather", 2)
    assert flight_recorder.is_on_gpu(pending) and not flight_recorder.is_on_gpu(queued)
    assert flight_recorder.last_issued() == 3
    assert flight_recorder.counts() == ((0, "0", 0, 0), (1, "0", 4, 1))
    recorded(other, queued)
    assert flight_recorder.oldest_pending() == queued  # the default group's


@pytest.mark.parametrize("timed", [True, False])
def test_operations_of_a_group_finish_with_it(recorded, timed):
    """batch_isend_irecv leaves an entry for each message, without events, and then its own."""
    sends = [entry(3, f"nccl:{name}", "scheduled", record=record, is_p2p=True)
             for record, name in enumerate(("send 0->1", "recv 0<-1"))]
    recorded(*sends, entry(3, "nccl:coalesced", "completed", record=2, is_p2p=True), timed=timed)
    assert flight_recorder.oldest_pending() is None
    waits = entry(3, "nccl:coalesced", "started", record=2, is_p2p=True)
    recorded(*sends, waits, timed=timed)
    assert flight_recorder.oldest_pending() == waits
    assert flight_recorder.name(waits) == "batch_isend_irecv"


def test_without_timing_every_pending_collective_of_nccl_may_be_on_the_gpu(recorded):
    recorded(entry(1, state="scheduled"), timed=False)
    assert flight_recorder.is_on_gpu(flight_recorder.oldest_pending())
    assert not flight_recorder.is_on_gpu(entry(1, "gloo:all_reduce"))
    assert not flight_recorder.is_on_gpu(None)


@pytest.mark.parametrize("given, plain", [
    ("nccl:all_reduce", "all_reduce"), ("nccl:_reduce_scatter_base", "reduce_scatter"),
    ("nccl:all_reduce_barrier", "barrier"), ("nccl:send 0->1", "send"),
    ("nccl:recv 0<-1", "recv"), ("nccl:all_to_all", "all_to_all"), ("gloo:broadcast", "broadcast")])
def test_names_are_those_that_the_student_calls(given, plain):
    assert flight_recorder.name({"profiling_name": given}) == plain


def test_messages_and_other_groups_have_no_number():
    assert flight_recorder.number(entry(4)) == 4 and flight_recorder.number(None) is None
    assert flight_recorder.number(entry(4, group=1)) is None
    assert flight_recorder.number(entry(4, "nccl:send 0->1", is_p2p=True)) is None


def test_a_recorder_that_torch_has_changed_says_nothing(monkeypatch):
    def changed(*_):
        raise TypeError("other arguments")

    monkeypatch.setattr(c10d, "_dump_fr_trace", changed)
    monkeypatch.delattr(c10d, "_dump_nccl_trace", raising=False)
    assert flight_recorder.oldest_pending() is None and flight_recorder.counts() == ()
    assert flight_recorder.last_issued() is None
    monkeypatch.setattr(c10d, "_dump_fr_trace", dump(*[entry(group=1)] * flight_recorder.RECORDED))
    assert flight_recorder.last_issued() is None  # those of the default group are forgotten


# hangs


def waits_on_the_gpu(state):
    """On rank 0: stands in a call, as `.item()` does, while NCCL's recorder says `state`."""
    if dist.get_rank() == 0:
        c10d._dump_nccl_trace = dump(entry(1, state=state))
        ctypes.CDLL(None).pause()


def test_a_rank_that_waits_in_a_kernel_for_one_that_has_returned():
    with pytest.raises(RanksStuck) as caught:
        launch(waits_on_the_gpu, "started", ranks=2, quiet=True)
    lines = str(caught.value).splitlines()
    line = waits_on_the_gpu.__code__.co_firstlineno + 4
    assert lines[0] == "deadlock; all ranks were stopped"
    assert lines[1].startswith(f"rank 0 waits in all_reduce (#1) at test_nccl.py line {line}")
    assert lines[2:] == ["rank 1 already returned",
                         "rank 1 never joined all_reduce: every rank must call every collective."]


def test_a_rank_whose_own_kernels_still_run_is_waited_for_unless_nothing_tells():
    with pytest.raises(RanksStuck, match="not done after 2 s"):
        launch(waits_on_the_gpu, "scheduled", ranks=2, quiet=True, hang_after=1, timeout=2)
    with pytest.raises(RanksStuck, match="deadlock"):  # where time is measured, no start is noted
        launch(waits_on_the_gpu, "scheduled", ranks=2, quiet=True, hang_after=1, timeout=20,
               verify=False)


def test_instructions_that_look_at_numbers_may_wait_for_the_gpu():
    def look(*_):
        seen.append(heartbeat._may_wait_for_gpu(heartbeat.Snapshot.of(sys._getframe(1))))
        return ""

    class Number:
        __getitem__ = __call__ = __format__ = __add__ = look

        def __bool__(self):
            seen.append(heartbeat._may_wait_for_gpu(heartbeat.Snapshot.of(sys._getframe(1))))
            return True

    seen, number = [], Number()
    if number:
        number[0], number(), f"{number}"
    assert seen == [True] * 4
    number + 1  # a kernel is launched, and nobody waits
    assert seen[4:] == [False]


def snapshot(file, function="all_reduce"):
    code = SimpleNamespace(co_filename=file, co_name=function)
    return heartbeat.Snapshot(code, 0, 0, [source_lines.Place(file, 1, function)])


def test_ranks_that_connect_have_more_time(monkeypatch):
    heart = heartbeat.Heartbeat.__new__(heartbeat.Heartbeat)
    heart.has_nccl, heart.waits = True, heartbeat.MainThreadWaits()
    in_collective = snapshot(dist.distributed_c10d.__file__)
    in_ddp = snapshot("/x/torch/distributed/utils.py", "_verify_param_shape_across_processes")
    assert heart._may_connect(in_collective, None) and heart._may_connect(in_ddp, None)
    assert heart._may_wait_in_cpp(in_ddp, None)
    assert not heart._may_connect(snapshot("train.py"), None)
    assert not heart._may_connect(in_collective, entry())  # torch has told
    heart.has_nccl = False
    assert not heart._may_connect(in_collective, None)

    def handle(**fields):
        now = time.monotonic()
        progress = Progress(collective="all_reduce", since=now - 20, quiet_since=now - 20, sent=now,
                            **fields)
        return RankHandle(0, None, None, progress=progress)

    assert hang_rules.stuck_reason([handle()], 10)
    assert not hang_rules.stuck_reason([handle(connecting=True)], 10)
    monkeypatch.setattr(hang_rules, "START_TIMEOUT", 15)
    assert hang_rules.stuck_reason([handle(connecting=True)], 10)


# deaths and errors


def test_a_rank_that_nccl_ends_because_another_died_is_not_to_blame():
    def work():
        dist.barrier()
        if dist.get_rank() == 0:
            os.write(2, REMOTE.encode())
            os.abort()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed) as caught:
        launch(work, ranks=2, quiet=True)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 1 was killed by signal 9")
    assert lines[1] == "rank 0 lost its connection: another rank had left"


@pytest.mark.parametrize("said, lost", [
    (REMOTE, True), ("NCCL communicator was aborted on rank 1.", True), (FULL_SHM, False),
    (ASSERT, False), (DUPLICATE, False), (NO_ROOM, False)])
def test_words_of_a_lost_peer(said, lost):
    assert nccl.lost_peer(said) == lost


def test_an_error_of_nccl_that_another_rank_caused_is_a_lost_connection():
    def work():
        dist.barrier()
        if dist.get_rank() == 0:
            raise dist.DistBackendError(REMOTE)
        time.sleep(0.1)
        raise ValueError("the cause")

    with pytest.raises(RankFailed, match="rank 1 raised ValueError: the cause"):
        launch(work, ranks=2, quiet=True)


def test_a_kernels_assertion_that_ended_the_process_is_explained():
    death = Outcome(0, Kind.KILLED, exit_code=-6, message=f"terminate called\n  what(): {ASSERT}")
    assert "(SIGABRT): a kernel's assertion failed, probably at an index" in describe(death)
    raised = Outcome(0, Kind.RAISED, error_type="AcceleratorError", message=ASSERT)
    assert "That is: a kernel's assertion failed" in describe(raised)
    students = Outcome(0, Kind.RAISED, error_type="ValueError", message=ASSERT)
    assert "That is" not in describe(students)


@pytest.mark.parametrize("said, why", [
    (DUPLICATE, "two ranks use the same GPU"), (FULL_SHM, "no room in /dev/shm"),
    ("CUDA error: uncorrectable ECC error encountered", "memory of its GPU is damaged"),
    ("CUDA error: an illegal memory access was encountered", "a crash in a kernel")])
def test_errors_with_a_known_cause(said, why):
    assert why in nccl.cause(said) and nccl.cause("something else") == ""


def test_a_gpu_without_room_for_nccl_is_out_of_memory():
    def work():
        raise dist.DistBackendError(NO_ROOM)

    with pytest.raises(OutOfMemory, match="asked for more; its GPU has no more"):
        launch(work, ranks=1, quiet=True, memory_limit=500e6)
    short = memory.oom_info(torch.OutOfMemoryError(), "CUDA out of memory. Tried to allocate 1.00 "
                            "GiB. GPU 0 has a total capacity of 79.25 GiB", 500_000_000)
    assert (short.asked, short.held, short.allowed) == (2**30, 0, 500_000_000)
    assert memory.oom_info_of_dead(NO_ROOM, 5).on_gpu and not memory.oom_info_of_dead(ASSERT)


def test_a_factor_on_the_gpu_is_not_read():
    factor = torch.tensor(0.5, device="meta")  # reading it would raise, as on a GPU it would wait
    assert collective_matching._reduction(dist._make_nccl_premul_sum(factor)).endswith(
        "of factor on the GPU")


# what torch is told


def test_the_ranks_environment():
    def work():
        return {name: os.environ.get(name) for name in names}

    names = [*nccl.environment(True), "NCCL_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE"]
    [checked] = launch(work, ranks=1, quiet=True)
    assert checked == {**nccl.environment(True), "NCCL_SOCKET_IFNAME": "=lo",
                       "TORCH_FR_BUFFER_SIZE": str(flight_recorder.RECORDED)}
    [measured] = launch(work, ranks=1, quiet=True, verify=False, environment={
        "TORCH_NCCL_ENABLE_MONITORING": "1"})
    assert measured["TORCH_NCCL_ENABLE_TIMING"] == "0"
    assert measured["TORCH_NCCL_ENABLE_MONITORING"] == "1"  # the caller's word counts


def test_torch_knows_the_variables():
    """They are named in the header that is part of torch."""
    header = os.path.join(os.path.dirname(torch.__file__),
                          "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp")
    with open(header) as file:
        text = file.read()
    assert [name for name in nccl.environment(True) if f'"{name}"' not in text] == []
