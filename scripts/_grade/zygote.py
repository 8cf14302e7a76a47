"""Imports once what all exercises need, and forks a process for each, which enters namespaces of
its own. It never reads a submission: what a fork inherits from it is no secret.

    python -P -m _grade.zygote SOCKET SOCKET USER PACKAGE...

The second socket is that of a fork that has imported no check, and is to have none in its memory:
the answers' processes that are judged apart come from it.
USER: the number to become, 0 to stay who it is. Without a package it imports nothing, and its forks
look at what was handed in (look). Over the socket come the plans, as JSON with up to four
descriptors each: a job and what its role needs (_run). The answer is a descriptor of the process
that ends when nothing is left of the submission's: numbers of processes are others outside.
"""

import contextlib
import functools
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import time
from importlib import import_module

from _grade import namespaces


def main(descriptor: int, of_answers: int, user: int, packages: list[str]) -> None:
    """Serves until the other end of the socket closes."""
    if user:
        namespaces.become(user)
    namespaces.die_with_parent()
    if packages:
        from _grade import reach
        from labs.workers import third_party

        _import([*third_party.MODULES, "_grade.answering", *reach.BASE])
        if os.fork() == 0:
            namespaces.die_with_parent()
            os.close(descriptor)
            _serve(of_answers)
            os._exit(0)
    os.close(of_answers)
    _import_all(packages)
    os.write(descriptor, b"ready\n")
    _serve(descriptor)


def _serve(descriptor):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the grader ends what runs
    with socket.socket(fileno=descriptor) as control:
        while True:
            message, descriptors, *_ = socket.recv_fds(control, 1 << 20, 4)
            if not message:
                return
            child = os.fork()
            if child == 0:
                control.close()
                _run(json.loads(message), *descriptors)
            for each in descriptors:
                os.close(each)
            process = os.pidfd_open(child)
            socket.send_fds(control, [b"started\n"], [process])
            os.close(process)


def _import_all(packages):
    """Everything that checks import, so that no fork has to."""
    _import(["labs.workers.forkserver_preload", "_grade.inside", "_grade.judge"] if packages else
            ["_grade.look"])
    for package in packages:
        found = import_module(package)
        _import(module.name for module in pkgutil.walk_packages(found.__path__, f"{package}."))


def _import(names):
    for name in names:
        import_module(name)
    gc.collect()
    gc.freeze()


def _run(plan, job, *others):
    """In a fork: one exercise, or one file to look at. others: descriptors, by plan["role"]: of
    "look", "check" and "judge" the first takes what is found; "check" has an alarm (guard), "judge"
    and "answer" a socket to each other. Where plan["counts"], the last one takes the bytes that
    went over the loopback interface; this process alone has it. Returns never."""
    others, counts = (others[:-1], others[-1]) if plan["counts"] else (others, None)
    try:
        namespaces.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wait_for_the_job(job)
        os.environ.clear()
        os.environ.update(plan["environment"])

        def work():
            if counts is not None:
                os.close(counts)
            namespaces.hide_memory()
            _discard_output()
            _work_of(plan)(job, *others)

        limits = namespaces.Limits(**plan["limits"])
        if plan["isolated"]:
            sent = namespaces.run_isolated(plan["shown"], limits, work, (job, *others),
                                           plan.get("instead"))
            if counts is not None:
                os.write(counts, str(sent).encode())
        else:
            _run_unsafe(plan["folder"], limits, work)
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def _work_of(plan):
    role, modules = plan["role"], sys.modules
    if role == "check":
        return functools.partial(modules["_grade.inside"].main, root=plan["root"])
    return modules[{"look": "_grade.look", "judge": "_grade.judge",
                    "answer": "_grade.answering"}[role]].main


def wait_for_the_job(job):
    """Returns when the grader has this process's number in hand, which it says by sending the job:
    a process that ends earlier could not be waited for."""
    select.select([job], [], [])


def _discard_output():
    """What a submission prints past Python goes nowhere: a log that all shared, one could fill."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _run_unsafe(folder, limits, work):
    """Without namespaces: limits, a folder, and at the end a search for what it has left."""
    import psutil

    _call_subreaper()
    child = os.fork()
    if child == 0:
        namespaces.die_with_parent()
        os.setsid()
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
        namespaces.restrict(limits, count_processes=False)
        namespaces.or_exit(work)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    os.waitpid(child, 0)
    deadline = time.monotonic() + 5
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _call_subreaper():
    set_child_subreaper = 36
    namespaces.call("prctl", set_child_subreaper, 1, 0, 0, 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
