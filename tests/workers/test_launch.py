"""What a launch gives back: results, output, reports; who it runs on; what cannot travel."""

import os
import signal
import threading
import time
import warnings
from types import SimpleNamespace

import leaks
import pytest
import torch
import torch.distributed as dist

import labs
import labs.workers.source_lines
from labs import launch
from labs.workers import cuda, devices
from labs.workers.pickling import CannotSend

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_results_come_back_by_rank_from_a_closure():
    bias = torch.tensor([1.0, 2.0])

    def work(scale):
        total = torch.full((2,), float(dist.get_rank()))
        dist.all_reduce(total)
        return dist.get_rank(), total * scale + bias

    results = launch(work, 10, ranks=4, quiet=True)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    # 0 + 1 + 2 + 3 on every rank, times 10, plus the captured bias
    assert all(value.tolist() == [61.0, 62.0] for _, value in results)
    assert results.seconds > 0


def test_ranks_are_fresh_processes_with_their_share_of_the_cores():
    def work():
        return (os.getpid(), torch.get_num_threads(), os.environ["RANK"], str(labs.device()),
                os.environ.get("LABS_TEST_VARIABLE"))

    first = launch(work, ranks=2, quiet=True)
    os.environ["LABS_TEST_VARIABLE"] = "changed"
    try:
        second = launch(work, ranks=2, quiet=True)
    finally:
        del os.environ["LABS_TEST_VARIABLE"]
    assert len({pid for pid, *_ in [*first, *second]}) == 4
    assert [row[1:] for row in first] == [(max(1, devices.cores() // 2), str(r), "cpu", None)
                                          for r in range(2)]
    assert [row[4] for row in second] == ["changed", "changed"]


def test_printed_lines_arrive_whole_in_rank_order(capfd):
    def work():
        print("first", dist.get_rank())
        os.write(1, b"from C\n")
        print("no newline at the end", end="")

    results = launch(work, ranks=3)
    shown = capfd.readouterr().out.splitlines()
    lines = [line for line in shown if line.startswith("rank ")]
    assert lines == [f"rank {r} │ {text}" for r in range(3)
                     for text in (f"first {r}", "from C", "no newline at the end")]
    assert results.output[2] == "first 2\nfrom C\nno newline at the end"


def test_output_is_live(capfd):
    """A line is shown while its rank still runs."""
    seen = []

    def work():
        print("early")
        time.sleep(1.2)

    thread = threading.Thread(target=lambda: seen.append(launch(work, ranks=1)))
    thread.start()
    time.sleep(0.9)
    early = capfd.readouterr().out
    thread.join()
    assert "rank 0 │ early" in early and not leaks.workers_of(os.getpid())


def test_reports_stream_from_rank_0():
    def work():
        for step in range(4):
            labs.report(step=step, total=4, loss=torch.tensor(1.0 / (step + 1)), lr=0.1)

    series = launch(work, ranks=2, quiet=True).series
    assert series["step"] == [0, 1, 2, 3]
    assert series["loss"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert series["lr"] == [0.1] * 4


def test_only_loopback_listens_while_a_launch_runs():
    found = []

    def work():
        dist.all_reduce(torch.ones(1))
        time.sleep(0.8)

    thread = threading.Thread(target=lambda: launch(work, ranks=2, quiet=True))
    thread.start()
    assert leaks.until(lambda: len(leaks.workers_of(os.getpid())) == 2)
    while thread.is_alive():
        found += leaks.listening_elsewhere(leaks.workers_of(os.getpid()))
        time.sleep(0.05)
    assert not found


@pytest.mark.slow
def test_a_script_is_not_run_again_on_its_ranks(tmp_path):
    """A solution runs as a plain script: no `if __name__ == "__main__"` is needed."""
    import subprocess
    import sys

    script = tmp_path / "plain.py"
    script.write_text("print('top')\nfrom labs import launch\n"
                      "def f(x):\n    return x + 1\n"
                      "print(launch(f, 1, ranks=2, quiet=True))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=180)
    assert done.stdout.splitlines() == ["top", "[2, 2]"], done.stderr


def test_an_edited_user_module_is_read_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "users_module.py"

    def work():
        import users_module

        return users_module.VALUE

    module.write_text("VALUE = 'old'\n")
    assert launch(work, ranks=1, quiet=True) == ["old"]
    module.write_text("VALUE = 'newer'\n")
    assert launch(work, ranks=1, quiet=True) == ["newer"]


def test_labs_itself_is_read_again_when_it_was_edited():
    """Workers share the fork server's copy of labs.workers only while its files are unchanged."""
    import sys

    def has_the_servers_copy():
        return "labs.workers.forkserver_preload" in sys.modules

    file = labs.workers.source_lines.__file__
    before = os.stat(file)
    assert launch(has_the_servers_copy, ranks=1, quiet=True) == [True]
    try:
        os.utime(file)
        assert launch(has_the_servers_copy, ranks=1, quiet=True) == [False]
    finally:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert launch(has_the_servers_copy, ranks=1, quiet=True) == [True]


@pytest.mark.slow
def test_spawn_where_there_is_no_fork_server(monkeypatch):
    monkeypatch.setenv("LABS_START_METHOD", "spawn")

    def work():
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert launch(work, ranks=2, quiet=True) == [2.0, 2.0]


def test_an_interrupt_while_a_process_is_asked_for(monkeypatch):
    """Half asked for, it would wait for the other half for ever."""
    from multiprocessing import forkserver

    from labs.workers.failures import Interrupted

    ask = forkserver.connect_to_new_process

    def interrupted(fds):
        ends = ask(fds)
        os.kill(os.getpid(), signal.SIGINT)
        return ends

    monkeypatch.setattr(forkserver, "connect_to_new_process", interrupted)
    with pytest.raises(Interrupted):
        launch(dist.get_rank, ranks=2, quiet=True)
    assert leaks.until(lambda: not leaks.workers_of(os.getpid()), 5)
    monkeypatch.undo()
    assert launch(dist.get_rank, ranks=2, quiet=True) == [0, 1]


def test_two_launches_at_once():
    def work(value):
        total = torch.tensor([value])
        dist.all_reduce(total)
        return total.item()

    results = {}

    def run(value):
        results[value] = launch(work, value, ranks=2, quiet=True)

    threads = [threading.Thread(target=run, args=(value,)) for value in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == {value: [2 * value] * 2 for value in range(4)}


@pytest.mark.parametrize("ranks, error, phrase", [
    (0, ValueError, "at least 1"), (-1, ValueError, "at least 1"),
    ("four", TypeError, "whole number"), (True, TypeError, "whole number")])
def test_a_wrong_number_of_ranks_is_one_sentence(ranks, error, phrase):
    with pytest.raises(error, match=phrase):
        launch(print, ranks=ranks)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="no option rank; it has ranks, device"):
        launch(print, rank=2)


def test_a_launch_inside_a_launch_is_refused():
    def work():
        try:
            launch(print, ranks=2)
        except labs.LaunchError as error:
            return str(error)

    assert "on a rank" in launch(work, ranks=1, quiet=True)[0]


def test_a_module_that_cloudpickle_cannot_pickle_is_imported_on_the_rank():
    def size_of(model):  # names `dist` and `config`: cloudpickle sends torch.distributed.config
        return model.config, dist.get_world_size()

    assert launch(size_of, SimpleNamespace(config=3), ranks=1, quiet=True) == [(3, 1)]
    assert launch(lambda found: found.__name__, torch.distributed.config, ranks=1,
                  quiet=True) == ["torch.distributed.config"]


def test_what_cannot_travel_is_named():
    lock = threading.Lock()

    def work():
        return lock

    with pytest.raises(CannotSend, match=r"'lock', used in work\(\), cannot be sent .* a lock"):
        launch(work, ranks=2)
    with pytest.raises(CannotSend, match="argument 1 cannot be sent .* a generator"):
        launch(print, (i for i in range(3)), ranks=2)


def test_a_large_captured_value_is_warned_about():
    table = torch.zeros(15_000_000)

    def work():
        return table.numel()

    with pytest.warns(UserWarning, match=r"60 MB are sent to every rank, most of it 'table'"):
        assert launch(work, ranks=1, quiet=True) == [15_000_000]


def test_a_result_that_cannot_travel_is_named_with_its_rank():
    def work():
        return threading.Lock() if dist.get_rank() == 1 else 1

    with pytest.raises(labs.RankFailed, match="rank 1 returned a lock, which cannot be sent back"):
        launch(work, ranks=2, quiet=True)


def test_the_plan_says_what_was_chosen_and_why(monkeypatch):
    monkeypatch.setattr(cuda, "count", lambda: 0)
    assert (devices.plan(3).backend, devices.plan(3).devices) == ("gloo", ("cpu",) * 3)
    assert "no GPU here" in devices.plan(3).reason
    monkeypatch.setattr(cuda, "count", lambda: 1)
    assert devices.plan().ranks == devices.default_ranks() >= 2
    assert devices.plan(2).backend == "gloo" and devices.plan(2).devices == ("cuda:0", "cuda:0")
    assert "share 1 GPU" in devices.plan(2).reason
    monkeypatch.setattr(cuda, "count", lambda: 8)
    assert devices.plan().ranks == 8 and "nccl" in devices.plan().backend
    assert devices.plan(2, "cpu").devices == ("cpu", "cpu")


def test_many_ranks_are_a_warning():
    assert devices.oversubscription(8) is None
    assert "9999 ranks" in devices.oversubscription(9999)


@pytest.mark.gpu
def test_ranks_run_on_the_gpu():
    def work():
        value = torch.ones(2, device=labs.device())
        dist.all_reduce(value)
        return value

    ranks = max(2, torch.cuda.device_count())
    results = launch(work, ranks=ranks, quiet=True)
    assert all(value.is_cuda and value.tolist() == [ranks] * 2 for value in results)


def test_no_needless_warnings():
    def work():
        x = torch.ones(4)
        out = torch.empty(8)
        dist.all_gather_single(out, x)  # on torch 2.11 too: a rank adds the name

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = launch(work, ranks=2, quiet=True)
    assert results.output == ["", ""]


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch < 2.13 has the old names")
@pytest.mark.parametrize("verify", [True, False])
def test_an_old_name_is_a_warning_that_names_the_students_line(verify, capfd):
    def work():
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))

    launch(work, ranks=2, device="cpu", verify=verify)
    out = "".join(capfd.readouterr())
    assert "Please use `torch.distributed.all_gather_single`" in out and "test_launch.py" in out
