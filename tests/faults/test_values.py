"""Values that travel badly, and output that would drown a notebook."""

import gc
import io
import threading
import time

import leaks
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from faults import faulty

import labs
from labs import launch
from labs.workers import hang_rules, output, pickling
from labs.workers.pickling import CannotSend

GB = 1_000_000_000


class Peak(threading.Thread):
    """The most memory that this process, and any of its ranks, had while it ran, in bytes."""

    def __enter__(self):
        self.done, self.ours, self.theirs = threading.Event(), 0, 0
        self.start()
        return self

    def run(self):
        this = psutil.Process()
        while not self.done.wait(0.01):
            self.ours = max(self.ours, this.memory_info().rss)
            for child in leaks.workers_of(this.pid):
                try:
                    self.theirs = max(self.theirs, child.memory_full_info().uss)
                except psutil.Error:
                    pass

    def __exit__(self, *_):
        self.done.set()
        self.join()


@pytest.mark.slow
def test_a_gigabyte_comes_back_in_bounded_memory(next_launch_works):
    gc.collect()
    before = psutil.Process().memory_info().rss
    with Peak() as peak:
        result = launch(faulty.returns_a_gigabyte, ranks=2)[1]
    assert result.shape == (250_000_000,) and result[-1] == 1
    # the value itself and little more, here and there
    assert peak.ours - before < 1.3 * GB
    assert peak.theirs < 1.4 * GB


def test_values_are_the_same_after_the_journey():
    odd = torch.arange(600_000, dtype=torch.float64).view(600, 1000)
    value = {"large": odd, "transposed": odd.t(), "bf16": odd.bfloat16(), "slice": odd[5:500],
             "small": torch.tensor(3), "array": np.arange(500_000), "empty": torch.empty(0, 3),
             "parameter": torch.nn.Parameter(odd.clone()), "text": "x" * 3_000_000, "none": None}
    incoming = _sent(value)
    for name, got in incoming.items():
        if isinstance(got, torch.Tensor):
            assert torch.equal(got, value[name]) and got.dtype == value[name].dtype, name
            assert (type(got), got.requires_grad) == (type(value[name]),
                                                      value[name].requires_grad)
        elif isinstance(got, np.ndarray):
            assert np.array_equal(got, value[name])
        else:
            assert got == value[name]
    incoming["large"] += 1  # what arrives can be written to
    incoming["array"] += 1


def _sent(value):
    packed = pickling.pack_result(value)
    incoming = pickling.IncomingResult([buffer.nbytes for buffer in packed])
    for buffer in packed:
        for start in range(0, buffer.nbytes, 1_000_003):
            incoming.add(bytes(buffer[start:start + 1_000_003]))
    assert incoming.complete
    return incoming.value()


def test_torchs_operators_can_be_sent():
    def fn(operator):
        return torch.ops.aten.neg(operator(torch.ones(1), 1)).item()

    assert launch(fn, torch.ops.aten.add, ranks=1, quiet=True) == [-2]
    assert pickling.unpack(pickling.pack(print, (torch.ops.aten.detach.default,)))[1] == (
        torch.ops.aten.detach.default,)


@pytest.mark.parametrize("make, words", [
    (lambda: (i for i in range(3)), "a generator"), (threading.Lock, "a lock"),
    (lambda: open(__file__), "an open file"), (lambda: open(__file__, "rb"), "an open file")],
    ids=["generator", "lock", "text file", "binary file"])
def test_what_cannot_be_sent_is_named(make, words, next_launch_works):
    thing = make()

    def work():
        return thing

    with pytest.raises(CannotSend, match=rf"'thing', used in work\(\), cannot be sent .* {words}"):
        launch(work, ranks=2)
    with pytest.raises(CannotSend, match=f"argument 1 cannot be sent to the ranks: it is {words}"):
        launch(print, thing, ranks=2)
    if isinstance(thing, io.IOBase):
        thing.close()


def test_a_result_that_cannot_be_read_here_is_named(next_launch_works):
    def work():
        class Odd:
            def __reduce__(self):
                return int, ("no number",)

        return Odd()

    with pytest.raises(labs.LaunchError, match="what rank 0 returned arrived, but cannot be read"):
        launch(work, ranks=2, quiet=True)


def test_an_endless_loop_is_pointed_at_and_not_ended(monkeypatch, capfd, next_launch_works):
    monkeypatch.setattr(hang_rules, "STALL_NOTICE", 1.0)

    def work():
        began = time.monotonic()
        while dist.get_rank() == 1 and time.monotonic() - began < 2.5:
            pass
        return "honest work"

    assert launch(work, ranks=2, quiet=True) == ["honest work"] * 2
    shown = capfd.readouterr().out
    assert "nothing new for 1 s: rank 0 already returned; rank 1 computes at test_values" in shown
    assert "Interrupt the cell" in shown


def test_outputs_that_are_compared_have_no_notice(monkeypatch, capfd):
    said = output.LaunchOutput(ranks=1, quiet=True)
    for in_notebook, progress, shown in ((True, "0", ""), (True, "1", "slow\n"),
                                         (False, "0", "slow\n")):
        monkeypatch.setattr(output, "in_notebook", lambda answer=in_notebook: answer)
        monkeypatch.setenv(output.OFF, progress)
        said.show_notice("slow")
        assert capfd.readouterr().out == shown


def test_all_of_a_flood_is_kept(next_launch_works):
    output = launch(faulty.prints_a_flood, ranks=4, quiet=True).output
    assert output == ["".join(f"line {number}\n" for number in range(100_000))] * 4


@pytest.mark.slow
def test_a_flood_without_end_does_not_fill_the_memory(next_launch_works):
    def work():
        while True:
            print("x" * 10_000)

    before = psutil.Process().memory_info().rss
    with pytest.raises(labs.RanksStuck, match="not done after 4 s"):
        launch(work, ranks=2, quiet=True, timeout=4)
    assert psutil.Process().memory_info().rss - before < 200_000_000
    assert all(len(text) < 17_000_000 for text in labs.last_failure().output)


def test_a_bar_that_a_rank_draws_is_one_line(capfd, next_launch_works):
    def work():
        for step in range(50):
            print(f"\rstep {step}", end="", flush=True)

    launch(work, ranks=2)
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("rank ")]
    assert shown == ["rank 0 │ step 49", "rank 1 │ step 49"]


def test_a_warning_says_how_often_it_came(capfd, next_launch_works):
    def work():
        import warnings

        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("careful", stacklevel=1)
        if dist.get_rank() == 0:
            warnings.warn("alone", stacklevel=1)

    results = launch(work, ranks=4)
    shown = capfd.readouterr().out
    line = work.__code__.co_firstlineno + 5
    assert f"ranks 0–3 │ UserWarning: careful, at test_values.py line {line} (12 times)\n" in shown
    assert f"rank 0 │ UserWarning: alone, at test_values.py line {line + 2}\n" in shown
    assert results.output[1].count("UserWarning: careful") == 3


def test_what_torch_says_of_its_own_work_is_not_shown_and_the_students_is(capfd,
                                                                          next_launch_works):
    """A model under FSDP2 that returns a view, as the logits of transformers' models are."""
    def work():
        import warnings

        from torch.distributed.fsdp import fully_shard

        class Heads(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x).view(2, 2)

        fully_shard(Heads(4, 4, bias=False))(torch.ones(1, 4)).sum().backward()
        warnings.warn("FSDP2-wrapped module (Mine) returned a view tensor", stacklevel=1)
        warnings.warn("another of the student's", stacklevel=1)

    results = launch(work, ranks=2, device="cpu")
    shown = capfd.readouterr().out
    line = work.__code__.co_firstlineno + 10
    assert f"returned a view tensor, at test_values.py line {line}\n" in shown
    assert f"another of the student's, at test_values.py line {line + 1}\n" in shown
    assert "(FSDPHeads)" not in shown + results.output[0]


def test_a_line_of_torchs_log_is_kept_and_not_shown():
    log = ("[rank1]:W1128 15:18:44.123000 13911 torch/distributed/tensor/_redistribute.py:390] "
           "While redistributing from (Shard(dim=0),), 2 sequential operations will be performed\n")
    printed = output.RankOutput()
    printed.feed(f"epoch 0\n{log}{log[8:]}W1128 15:18:44.1 1 mine.py:3] While redistributing\n"
                 .encode())
    assert printed.take() == ["epoch 0", "W1128 15:18:44.1 1 mine.py:3] While redistributing"]
    assert log in printed.text


def test_a_flood_of_different_warnings_is_cut(capfd, next_launch_works):
    def work():
        import warnings

        for number in range(1_000):
            warnings.warn(f"number {number}", stacklevel=1)

    results = launch(work, ranks=2)
    shown = [line for line in capfd.readouterr().out.splitlines() if "│" in line]
    assert len(shown) <= output.WARNINGS_SHOWN + 2
    assert "other warnings, which are not shown here; all are in .output (" in shown[-1]
    assert results.output[1].count("number") == 1_000


def test_reports_by_the_ten_thousand(next_launch_works):
    def work():
        for step in range(10_000):
            labs.report(step=step, loss=1.0)

    assert len(launch(work, ranks=2).series["loss"]) == 10_000


def test_a_rank_may_have_children():
    def work():
        from torch.utils.data import DataLoader

        return sum(batch.sum().item() for batch in DataLoader(torch.arange(64.0), num_workers=2))

    assert launch(work, ranks=2, quiet=True) == [2016.0] * 2


def test_children_of_a_rank_go_with_it(next_launch_works):
    def work():
        from torch.utils.data import DataLoader

        for batch in DataLoader(torch.arange(64.0), batch_size=4, num_workers=2):
            if batch[0] >= 8:
                raise ValueError("in the middle of an epoch")

    with pytest.raises(labs.RankFailed, match="in the middle of an epoch"):
        launch(work, ranks=2, quiet=True)
