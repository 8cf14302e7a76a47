"""What the student sees when ranks fail or wait for one another."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from labs import OutOfMemory, RankFailed, RanksStuck, last_failure, launch
from labs.workers import collective_matching, memory
from labs.workers.outcomes import Kind, Outcome
from labs.workers.output import last_lines

pytestmark = pytest.mark.usefixtures("nothing_left")


def failure(fn, kind=RankFailed, ranks=3, **options):
    """(message lines, seconds) of a launch that must fail."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        launch(fn, ranks=ranks, quiet=True, **options)
    assert last_failure() is caught.value
    return str(caught.value).splitlines(), time.monotonic() - began


def test_the_root_cause_comes_first_with_line_and_source():
    def inner(tensor):
        if dist.get_rank() == 1:
            raise ValueError("not this one")
        dist.all_reduce(tensor)

    def work():
        inner(torch.ones(2))

    lines, seconds = failure(work)
    line = inner.__code__.co_firstlineno + 2
    assert lines[0] == "rank 1 raised ValueError: not this one"
    assert lines[1].strip() == (
        f'test_failures.py line {line}, in inner:  raise ValueError("not this one")')
    assert lines[2].strip().startswith("called at test_failures.py") and "inner(torch" in lines[2]
    assert lines[3].startswith("ranks 0 and 2 wait in all_reduce (#1) at test_failures.py")
    assert seconds < 1.5
    assert "ValueError: not this one" in last_failure().traceback
    assert isinstance(last_failure().cause, ValueError)


def test_an_error_inside_a_hook_in_backward():
    def work():
        weight = torch.ones(2, requires_grad=True)

        def hook(gradient):
            raise KeyError("in a hook")

        weight.register_hook(hook)
        weight.sum().backward()

    lines, _ = failure(work, ranks=2)
    assert lines[0] == "rank 0 raised KeyError: 'in a hook'" or lines[0].startswith("rank 1")
    assert "raise KeyError" in lines[1] and "did the same" in lines[-1]


def test_a_rank_that_returns_early_is_named_at_once():
    def work():
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        if dist.get_rank() != 1:
            dist.all_reduce(tensor)

    lines, seconds = failure(work, RanksStuck)
    assert "ranks 0 and 2 wait in all_reduce (#2) at test_failures.py" in lines[1]
    assert lines[2] == "rank 1 already returned"
    assert lines[3] == "rank 1 never joined all_reduce: every rank must call every collective."
    assert seconds < 4  # certain after a second; no need to wait for hang_after


@pytest.mark.parametrize(("call", "words"), [
    ("send", "receive first, or send with isend"), ("recv", "must send first"),
    ("all_reduce", "same shape and dtype")])
def test_the_advice_on_a_message_is_not_that_on_a_collective(call, words):
    waiting = [Outcome(rank, Kind.WAITING, collective=call, number=1) for rank in range(2)]
    assert words in str(RanksStuck("no progress", waiting, code="no_progress"))


def test_a_rank_that_computes_for_ever_is_found_at_the_timeout():
    def work():
        while dist.get_rank() == 0:
            pass
        dist.all_reduce(torch.ones(1))

    lines, seconds = failure(work, RanksStuck, hang_after=0.5, timeout=2)
    assert lines[0] == "not done after 2 s; all ranks were stopped"
    assert lines[1].startswith("rank 0 computes at test_failures.py line")
    assert lines[2].startswith("ranks 1 and 2 wait in all_reduce (#1)")
    assert lines[3] == ("That is the timeout=2 of this launch: is there a loop on rank 0 that "
                        "never ends?")
    assert 2 < seconds < 10  # on a crowded machine the limit is up to three times as long


@pytest.mark.parametrize("verify", [True, False])
def test_different_collectives(verify):
    def work():
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.all_reduce(torch.ones(2))

    lines, seconds = failure(work, RanksStuck, hang_after=2, verify=verify)
    assert "broadcast" in lines[1] and lines[1].startswith("rank 0")
    assert "all_reduce" in lines[2] and lines[2].startswith("ranks 1 and 2")
    assert "same" in lines[3]
    if verify:
        assert lines[0].startswith("the ranks are not in the same collective") and seconds < 2


def test_different_shapes_are_named_at_once():
    def work():
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    lines, seconds = failure(work, RanksStuck, ranks=2)
    line = work.__code__.co_firstlineno + 1
    assert lines[1] == (
        f"rank 0 calls all_reduce of float32 [2] (#1) at test_failures.py line {line}")
    assert lines[2].startswith("rank 1 calls all_reduce of float32 [3] (#1)")
    assert seconds < 2


def test_a_different_order_of_two_collectives():
    def work():
        first, second = torch.ones(2), torch.ones(3)
        for tensor in (first, second) if dist.get_rank() else (second, first):
            dist.all_reduce(tensor)

    lines, seconds = failure(work, RanksStuck, ranks=2)
    assert "float32 [3] (#1)" in lines[1] and "float32 [2] (#1)" in lines[2] and seconds < 2


def test_reductions_are_compared_by_kind_and_factor():
    def work():
        total = torch.ones(2)
        dist.all_reduce(total, op=dist.ReduceOp(dist.ReduceOp.MAX))  # each rank has its own object
        return total.tolist()

    assert launch(work, ranks=2, quiet=True) == [[1.0, 1.0]] * 2
    halves, thirds = (collective_matching._reduction(dist.ReduceOp.PREMUL_SUM(factor))
                      for factor in (0.5, torch.tensor(1 / 4)))
    assert (halves, thirds) == (" with PREMUL_SUM of factor 0.5", " with PREMUL_SUM of factor 0.25")
    assert collective_matching._reduction(dist.ReduceOp(dist.ReduceOp.SUM)) == ""


def test_different_reductions():
    def work():
        dist.all_reduce(torch.ones(2), op=[dist.ReduceOp.MAX, dist.ReduceOp.SUM][dist.get_rank()])

    lines, _ = failure(work, RanksStuck, ranks=2)
    assert "rank 0 calls all_reduce of float32 [2] with MAX (#1)" in lines[1]
    assert "rank 1 calls all_reduce of float32 [2] (#1)" in lines[2]


def exchange(splits):
    """An all-to-all of rows of 2 elements in which rank r sends splits[r][s] rows to rank s."""
    rank = dist.get_rank()
    received = [row[rank] for row in splits]
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, torch.ones(sum(splits[rank]), 2), received, splits[rank])
    dist.all_to_all([torch.empty(2) for _ in splits], [torch.ones(2) for _ in splits])
    return len(output)


def test_an_all_to_all_of_unequal_splits():
    assert launch(exchange, [[1, 2, 3], [0, 1, 1], [2, 2, 0]], ranks=3, quiet=True) == [3, 5, 4]


def test_an_all_to_all_whose_splits_do_not_fit():
    def single():
        sent, received = ([2, 3], [2, 1]) if dist.get_rank() == 0 else ([1, 2], [2, 2])
        dist.all_to_all_single(torch.empty(sum(received), 2), torch.ones(sum(sent), 2), received,
                               sent)

    lines, seconds = failure(single, RanksStuck, ranks=2)
    assert "all_to_all of float32 that sends [4, 6] and receives [4, 2] elements (#1)" in lines[1]
    assert lines[3] == "Rank 0 sends 6 elements to rank 1, which expects 4." and seconds < 3

    def lists():
        size = 2 + dist.get_rank()
        dist.all_to_all([torch.empty(size) for _ in range(2)], [torch.ones(size)] * 2)

    lines, _ = failure(lists, RanksStuck, ranks=2)
    assert lines[3] in ("Rank 0 sends 2 elements to rank 1, which expects 3.",
                        "Rank 1 sends 3 elements to rank 0, which expects 2.")


def test_an_all_to_all_with_splits_for_another_group():
    def work():
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [2, 2])  # of 3 ranks

    lines, _ = failure(work, RankFailed, ranks=3)
    assert "Number of tensor splits not equal to group size" in "\n".join(lines)


def test_collectives_made_of_collectives_and_torchs_own_are_no_mismatch():
    """Object collectives are made of others, DDP calls from C++, groups count apart."""

    def work():
        rank = dist.get_rank()
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=pair)
        gathered = [None] * 3
        dist.all_gather_object(gathered, {"rank": rank} if rank else [rank] * 50)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        dist.broadcast(torch.ones(3), src=1)
        return len(gathered)

    assert launch(work, ranks=3, quiet=True) == [3, 3, 3]


def test_a_subgroup_may_go_on_after_another_rank_has_returned():
    """Not a deadlock: ranks 0 and 1 work in their own group, rank 2 is done."""

    def work():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            return "done"
        if dist.get_rank() == 0:
            time.sleep(2)
        dist.all_reduce(torch.ones(1), group=group)
        return "done"

    assert launch(work, ranks=3, quiet=True) == ["done"] * 3


@pytest.mark.parametrize("leave, words", [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9 (SIGKILL), probably"),
    (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by signal 11 (SIGSEGV)"),
    (lambda: os._exit(3), "ended its process with exit code 3"),
    (lambda: sys.exit(3), "called sys.exit(3)")], ids=["SIGKILL", "SIGSEGV", "_exit", "exit"])
def test_a_rank_that_leaves_is_named_for_what_it_did(leave, words):
    def work():
        if dist.get_rank() == 1:
            leave()
        dist.all_reduce(torch.ones(1))

    lines, seconds = failure(work)
    assert lines[0].startswith(f"rank 1 {words}")
    assert all("connection" in line or "wait" in line for line in lines[1:] if "rank" in line[:5])
    assert seconds < 2


def test_gloos_abort_is_explained_where_nobody_compares():
    def work():
        dist.all_reduce(torch.ones(1000 if dist.get_rank() else 2))

    lines, _ = failure(work, ranks=2, verify=False)
    assert lines[0].startswith("rank 0 was killed by signal 6 (SIGABRT): gloo received ")
    assert lines[0].endswith("the ranks are in different collectives, or their tensors differ in "
                             "shape")
    assert not [line for text in last_failure().output for line in last_lines(text)]


def test_a_keyboard_on_a_rank():
    lines, _ = failure(lambda: input("your name? "), ranks=1)
    assert "a rank has no keyboard" in lines[0]


def test_the_next_launch_works_after_every_failure():
    assert launch(dist.get_rank, ranks=2, quiet=True) == [0, 1]


def test_what_cplusplus_says_of_a_lack_of_memory_is_understood():
    """Small allocations inside libtorch fail so, under notebook 04's limit now and then."""
    short = memory.oom_info(RuntimeError("std::bad_alloc"), "std::bad_alloc", 28_000_000)
    assert str(short) == "asked for more; its memory_limit is 28 MB"
    wrapped = RuntimeError("Sharding propagation failed")
    assert memory.oom_info(wrapped, str(wrapped), 28_000_000) is None
    wrapped.__cause__ = MemoryError()
    assert memory.oom_info(wrapped, str(wrapped), 28_000_000)


def test_a_rank_whose_cplusplus_code_gives_up_for_lack_of_memory_ran_out_of_it():
    def gives_up():
        import ctypes

        if dist.get_rank() == 1:
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
            ctypes.CDLL(None).abort()
        dist.barrier()

    lines, _ = failure(gives_up, kind=OutOfMemory, ranks=2, memory_limit=300e6)
    assert lines[0] == ("rank 1 ran out of memory in C++ code, which gave up: it asked for more; "
                        "its memory_limit is 300 MB")


def test_a_small_allocation_that_failed_is_said_in_kilobytes():
    assert str(memory.OOMInfo(25_600, 36e6, 36e6)).startswith("held 36 MB and asked for 26 kB")
