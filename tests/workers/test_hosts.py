"""Hosts on one machine: what runs on them, what passes their links, what is unplugged and killed.
What they leave behind, and where they are refused, is in test_hosts_end.py."""

import json
import re
import sys
import threading
from _thread import interrupt_main

import leaks
import pytest

from labs.workers.hosts import JobFailed, hosts, jobs, links, torchrun
from labs.workers.launch_error import Stopped

NBYTES = 2_000_000  # of the tensor that is all-reduced

TRAIN = f"""
import json, os, time, torch, torch.distributed as dist
from labs.workers.hosts import link_bytes
dist.init_process_group("gloo")
tensor = torch.ones({NBYTES} // 4)
dist.all_reduce(tensor)
dist.barrier()
time.sleep(0.2)  # the barrier's last messages pass
before = link_bytes()
dist.all_reduce(tensor)
dist.barrier()
wire = link_bytes() - before
sysfs = int(open("/sys/class/net/eth0/statistics/tx_bytes").read())
print(json.dumps(dict(rank=dist.get_rank(), local=os.environ["LOCAL_RANK"], sum=tensor[0].item(),
                      master=os.environ["MASTER_ADDR"], name=os.uname().nodename,
                      sent=wire.sent, received=wire.received, sysfs=sysfs >= wire.sent)))
dist.barrier()
dist.destroy_process_group()
"""

# Host 0 prints each message that host 1 sends every 10 ms, and how it ended.
# The end of what torchrun prints where a rank failed.
CHILD_FAILED = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Failures:
[1]:
  rank      : 2 (local_rank: 0)
  exitcode  : -15 (pid: 4)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_07:06:29
  host      : host1
  rank      : 3 (local_rank: 1)
  exitcode  : %s
  error_file: <N/A>
"""
TALK = """
import socket, sys, time
if sys.argv[1] == "0":
    connection, _ = socket.create_server(("10.0.0.1", 5000)).accept()
    connection.settimeout(float(sys.argv[2]))
    try:
        while message := connection.recv(8, socket.MSG_WAITALL):
            print("got", int(message))
        print("closed")
    except TimeoutError:
        print("silence")
while sys.argv[1] == "1":
    try:
        connection = socket.create_connection(("10.0.0.1", 5000))
    except ConnectionError:
        continue
    for number in range(10**7):
        connection.sendall(b"%08d" % number)
        time.sleep(0.01)
"""

# Host 0 prints the seconds of messages there and back, and of megabytes.
MEASURE = """
import socket, sys, time
sizes = 9 * [1] + 2 * [1_000_000]
if sys.argv[1] == "1":
    connection, _ = socket.create_server(("10.0.0.2", 5000)).accept()
    for size in sizes:
        left = size
        while left:
            left -= len(connection.recv(left))
        connection.sendall(b"k")
while sys.argv[1] == "0":
    try:
        connection = socket.create_connection(("10.0.0.2", 5000))
    except ConnectionError:
        continue
    for size in sizes:
        message, began = bytes(size), time.perf_counter()
        connection.sendall(message)
        connection.recv(1)
        print(time.perf_counter() - began)
    break
"""


def script(code, *words):
    return lambda host: ["python", "-S", "-c", code, str(host.index), *words]


@pytest.fixture(scope="module")
def pair(needs_hosts):
    with hosts(2, bandwidth="200mbit") as pair:
        yield pair


def measured(pair) -> list[float]:
    """Seconds of the fastest round trip, and of the fastest megabyte, from host 0 to host 1."""
    done = pair.run(script(MEASURE), on=(0, 1), quiet=True, timeout=60)
    seconds = [float(line) for line in done.output[0].split()]
    return [min(seconds[:9]), min(seconds[9:])]


def test_each_host_has_its_own_name_network_and_processes(pair, capsys):
    done = pair.run(["sh", "-c", "hostname; ls -x /sys/class/net; getent hosts host1; ls /proc"])
    assert done.exit_codes == {0: 0, 1: 0}
    assert capsys.readouterr().out.startswith("host 0 │ host0\nhost 0 │ eth0  lo\n")
    for index in (0, 1):
        name, links_there, other, *processes = done.output[index].splitlines()
        assert (name, links_there.split(), other.split()) == (
            f"host{index}", ["eth0", "lo"], ["10.0.0.2", "host1"])
        assert len([word for word in processes if word.isdigit()]) < 6


@pytest.mark.slow
def test_torchrun_finds_the_other_host_and_the_link_carries_what_the_formula_says(
        pair, tmp_path, capsys):
    (tmp_path / "train.py").write_text(TRAIN)
    done = pair.run(["torchrun", "--nproc-per-node", "1", "train.py"], folder=str(tmp_path),
                    environment={"PYTHONPATH": ":".join(sys.path)}, timeout=240)
    assert "host 1 │ rank 1 │ {" in capsys.readouterr().out
    for index in (0, 1):
        found = json.loads(re.search(r"\{.*\}", done.output[index])[0])
        assert (found["rank"], found["local"], found["name"]) == (index, "0", f"host{index}")
        assert found["master"] == "10.0.0.1" and found["sum"] == 4.0 and found["sysfs"]
        # 2(N-1)/N · S with N = 2 is S; headers are under 1 %, the acknowledgments of what comes
        # in and the barrier the rest.
        for which in ("sent", "received"):
            assert NBYTES < found[which] < 1.05 * NBYTES
        # In all: the two all-reduces, and what torchrun and the group need to meet.
        assert 2 * NBYTES < done.bytes[index].sent < 2.5 * NBYTES


def test_what_differs_by_host_stands_before_the_callers_own_arguments():
    first, second = (torchrun.torchrun(["torchrun", "--nnodes", "1:2", "x.py"], number,
                                       ["10.0.0.1", "10.0.0.2"], 7) for number in (0, 1))
    assert first[:5] == [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    assert first[-3:] == second[-3:] == ["--nnodes", "1:2", "x.py"]
    assert {(a, b) for a, b in zip(first, second, strict=True) if a != b} == {
        ("is_host=true", "is_host=false"), ("10.0.0.1", "10.0.0.2"),
        ("/run/job7-host0", "/run/job7-host1")}


@pytest.mark.parametrize(("command", "said"), [
    ("echo out; sleep 0.1; echo no such file >&2; exit 3",
     "exited with code 3 on host 1: no such file."),
    ("kill -9 $$", "was killed by SIGKILL on host 1"),
    ("echo 'rank 0 │ [rank0]: ValueError: wrong.'; echo after; exit 1",
     "exited with code 1 on host 1: ValueError: wrong."),
    (f"echo '{CHILD_FAILED % '7 (pid: 5) '}'; exit 1",
     "exited with code 1 on host 1: rank 3 exited with code 7.")])
def test_a_command_that_fails_raises_one_sentence(pair, command, said):
    with pytest.raises(JobFailed) as caught:
        pair.run(["sh", "-c", command], on=1, quiet=True)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.host == 1 and list(caught.value.result.exit_codes) == [1]


def test_a_failure_on_one_host_stops_the_other(pair, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE", 0.1)
    with pytest.raises(JobFailed, match=r"on host 1\. It was stopped on host 0"):
        pair.run(lambda host: ["sh", "-c", "exit 1" if host.index else "sleep 1000"])


def test_a_rank_that_was_killed_is_named_and_not_what_others_say_of_their_connection(pair):
    lost = "echo 'rank 0 │ RuntimeError: Connection closed by peer'; exit 1"
    killed = f"sleep 0.5; echo '{CHILD_FAILED % '-9 (pid: 5)  (SIGKILL)'}'; exit 1"
    with pytest.raises(JobFailed, match=r"failed: rank 3 on host 1 was killed \(SIGKILL\)\.$"):
        pair.run(lambda host: ["sh", "-c", killed if host.index else lost], quiet=True)


def test_an_interrupt_ends_in_one_sentence(pair):
    threading.Timer(0.5, interrupt_main).start()
    with pytest.raises(Stopped, match=r"interrupted; `sleep 1000` was stopped on hosts 0 and 1"):
        pair.run(["sleep", "1000"])
    assert leaks.until(lambda: not any(host.process.children() for host in pair))


def test_a_time_out_stops_all_that_the_command_started(pair):
    # The grandchild has a session of its own, as torchrun's ranks have.
    with pytest.raises(JobFailed, match="was not done after 0.5 s on hosts 0 and 1, and was stop"):
        pair.run(["sh", "-c", "setsid sleep 1000 & sleep 1000"], timeout=0.5)
    assert leaks.until(lambda: not any(host.process.children() for host in pair))


def test_what_a_job_prints_is_waited_for(pair):
    job = pair.start(["echo", "first"], on=0, quiet=True)
    job.wait_for("first")
    with pytest.raises(JobFailed, match="`echo first` ended before it printed 'second'"):
        job.wait_for("second")
    with pytest.raises(JobFailed, match="had not printed 'second' after 0.1 s"):
        pair.start(["sleep", "1000"], quiet=True).wait_for("second", timeout=0.1)


def test_a_host_that_does_not_exist_is_refused(pair):
    with pytest.raises(ValueError, match="there is no host 2: they are numbered from 0 to 1"):
        pair.run(["true"], on=2)


def test_a_cable_that_is_unplugged_carries_nothing_and_then_what_was_lost(pair):
    job = pair.start(script(TALK, "30"), quiet=True)
    job.wait_for("got 5\n")
    pair[1].unplug()
    before = job.result().output[0].count("got")
    with pair.count_bytes() as wire:
        pair.run(["sleep", "0.3"], on=0)
    assert wire[0].received == 0
    pair[1].plug()
    job.wait_for(f"got {before + 20}\n")
    job.stop()
    assert not job.running and job.stop() == []
    numbers = [int(number) for number in re.findall(r"got (\d+)\n", job.result().output[0])]
    assert numbers == list(range(len(numbers)))


@pytest.mark.slow
def test_three_hosts_on_a_slow_link_of_which_one_is_killed(pair):
    fast_trip, fast = measured(pair)
    with hosts(3, bandwidth="20mbit", latency="10ms") as three:
        trip, slow = measured(three)
        # Never faster than the link; on a busy machine both are slower.
        assert slow > 0.9 * 8e6 / 20e6 and trip > 0.02
        assert slow > 2 * fast and trip > 2 * fast_trip

        job = three.start(script(TALK, "1.5"), on=(0, 1), quiet=True)
        job.wait_for("got 5\n")
        three[1].kill()
        # No failure of the job's; and host 0 was not even told that its connection is closed.
        done = job.wait()
        assert done.exit_codes == {0: 0, 1: 137} and "silence" in done.output[0]
        with pytest.raises(RuntimeError, match="host 1 was killed"):
            three.run(["true"], on=1)
        assert set(three.run(["true"]).exit_codes) == {0, 2}
        assert len(three.bytes()) == 3
    with pytest.raises(RuntimeError, match="exist only inside the block"):
        three.run(["true"])


@pytest.mark.parametrize(("wrong", "said"), [
    ({"bandwidth": "200"}, "bandwidth='200': give a number above 0 and one of bit, kbit"),
    ({"bandwidth": "0mbit"}, "above 0"), ({"latency": "1mbit"}, "one of us, ms, s"),
    ({"number": 0}, "from 1 to 16 hosts")])
def test_what_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        hosts(**wrong)


def test_units_are_those_of_tc():
    assert links.read_bandwidth("1.5gbit") == 1.5e9
    assert links.read_latency("50us") == pytest.approx(50e-6)
    assert "burst 10100 " in links.token_bucket(1e6)  # one frame must fit
    assert "burst 31250 " in links.token_bucket(1e9)  # what passes in 0.25 ms
