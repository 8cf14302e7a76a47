"""A machine that is too small: no room in /tmp, a small /dev/shm, few open files, no memory."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from labs import launch
from labs.workers import devices

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import os, sys, tempfile
import torch, torch.distributed as dist
from labs import launch
def work():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
def fill(directory):
    with open(directory + "/full", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
    number = 0
    try:
        while number < 10_000:
            open(f"{directory}/{number}", "w").close()
            number += 1
    except OSError: pass
"""


def in_a_small_place(mounts, code):
    """What a script prints that sees small file systems in place of the usual directories, and a
    /dev/shm of its own: other tests look at what is left in the machine's."""
    mounts = {"/dev/shm": "size=1g"} | mounts
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root on Linux for a mount of its own")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("may not make a mount namespace here")
    steps = [f"mount -t tmpfs -o {options} tmpfs {where}" for where, options in mounts.items()]
    if any(ROOT.is_relative_to(where) for where in mounts):  # the checkout must stay in sight
        steps = [f"mount --bind '{ROOT}' /mnt", *steps, f"mkdir -p '{ROOT}'",
                 f"mount --bind /mnt '{ROOT}'"]
    mounted = " && ".join(steps)
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mounted} && exec "$@"', "sh", sys.executable, "-c",
         HEAD + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("inductors", ["/var/tmp/inductor", "/tmp/inductor"])
def test_tmp_is_full_from_the_start(inductors):
    """torch._dynamo, which is preloaded, wants to make a directory when it is imported."""
    shown = in_a_small_place({"/tmp": "size=64k,nr_inodes=40", "/var/tmp": "size=64k"}, f"""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "{inductors}"
        tempfile.gettempdir()
        fill("/tmp")
        print(launch(work, ranks=2, quiet=True))""")
    assert shown == "[2.0, 2.0]\n"


@pytest.mark.slow
def test_tmp_fills_up_between_two_launches():
    shown = in_a_small_place({"/tmp": "size=64k,nr_inodes=40"}, """
        print(launch(work, ranks=2, quiet=True))
        fill("/tmp")
        print(launch(work, ranks=2, quiet=True))""")
    assert shown == "[2.0, 2.0]\n" * 2


@pytest.mark.slow
def test_no_room_anywhere_is_one_sentence():
    small = "size=64k,nr_inodes=40"
    shown = in_a_small_place({"/tmp": small, "/dev/shm": small, "/var/tmp": small}, """
        tempfile.gettempdir()
        for directory in ("/tmp", "/dev/shm", "/var/tmp"): fill(directory)
        os.environ["HOME"] = "/tmp"
        os.chdir("/tmp")
        try: launch(work, ranks=2, quiet=True)
        except Exception as error: print(type(error).__name__, error)""")
    assert shown.startswith("LaunchError there is no room left in /tmp")


@pytest.mark.slow
def test_shared_memory_of_64_mb():
    shown = in_a_small_place({"/dev/shm": "size=64m"}, """
        def large(): return torch.ones(50_000_000)
        print(launch(work, ranks=2, quiet=True))
        print(sum(launch(large, ranks=2, quiet=True)[1]))""" .replace("sum(", "len("))
    assert shown == "[2.0, 2.0]\n50000000\n"


@pytest.mark.slow
def test_few_open_files():
    """Of 300 files that this process may open, 8 ranks need few enough; 100 do not."""
    done = subprocess.run([sys.executable, "-c", """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))""" + HEAD + """
print(launch(work, ranks=8, quiet=True))
try: launch(work, ranks=100, quiet=True)
except ValueError as error: print(error)"""], capture_output=True, text=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert first == str([8.0] * 8), done.stderr
    assert second.startswith("ranks=100 is more than this machine can run at once: at most 20 (")


@pytest.mark.parametrize("ranks", [1000, 100_000])
def test_far_too_many_ranks(ranks):
    if ranks <= devices.most_ranks():
        pytest.skip("this machine can run them")
    with pytest.raises(ValueError, match=f"ranks={ranks} is more than this machine can run"):
        launch(int, ranks=ranks)


@pytest.mark.parametrize("limit, error, phrase", [
    (4, ValueError, "is in bytes: 2 GB are memory_limit=2e9"),
    (-1e9, ValueError, "in bytes"), ("2 GB", TypeError, "bytes per rank")])
def test_a_wrong_memory_limit_is_one_sentence(limit, error, phrase):
    with pytest.raises(error, match=phrase):
        launch(int, ranks=1, memory_limit=limit)
