import gc
from collections import Counter

import _test_durations
import gate
import pytest

FIRST_FAILURES = {}  # of tests that are tried again, by their node ID


def pytest_addoption(parser):
    group = parser.getgroup("workbook")
    group.addoption("--gate", action="store_true", help="only the tests of tests/gate.py")
    group.addoption("--whole", action="append", default=[], metavar="FILE",
                    help="beside the gate, all tests of this file")


def pytest_sessionstart(session):
    """The fork server imports torch while the tests are being collected."""
    if getattr(session.config.option, "numprocesses", None):
        return  # this process only hands the tests out

    import labs

    labs.warm_up()


def pytest_collection_modifyitems(config, items):
    """Chooses the tests, sorts the files, and marks samples."""
    _mark_samples(items)
    seconds = _test_durations.read()
    if config.getoption("--gate"):
        gate.begin(config.getoption("--whole"))
        kept = gate.chosen(items, seconds, config.getoption("--whole"))
        left_out = set(items) - set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept
    # Files that take long are begun first, then those with many tests: at the end of a parallel
    # run one process would else be busy for minutes alone.
    long, tests = Counter(), Counter(item.path for item in items)
    for item in items:
        long[item.path] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: (-long[item.path], -tests[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    """Notes in pytest's report, for scripts/test, why a test that is tried again had failed."""
    if report.outcome == "rerun":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else report.longreprtext
        FIRST_FAILURES[report.nodeid] = message.partition("\n")[0]
    elif report.when == "teardown" and report.nodeid in FIRST_FAILURES:
        report.user_properties.append(("first failure", FIRST_FAILURES[report.nodeid]))


def pytest_collection_finish():
    """What the tests have imported stays: to look through it for garbage again and again takes a
    fifth of the time of tests that make many objects."""
    gc.freeze()


def _mark_samples(items):
    """Of a test marked `sample(step)`, and of each file of an exercise, marks all but each step-th
    case as slow: --fast runs the first of them, and so some of each exercise."""
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("sample")
        tried = gate.is_of_an_exercise(item.nodeid.partition("::")[0])
        step = 40 if tried else mark.args[0] if mark else 1
        counted = item.path if tried else item.nodeid.split("[")[0]
        if seen[counted] % step:
            item.add_marker(pytest.mark.slow)
        seen[counted] += 1


def pytest_runtest_setup(item):
    """A test marked `gpu` is skipped where there is none."""
    from labs.workers import cuda

    if item.get_closest_marker("gpu") and not cuda.count():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def nothing_left_on_gpus(request):
    """Fails a test marked `gpu` that leaves a rank or GPU memory behind. What this process itself
    holds from its first use of a GPU on, its context, is no leak; nor are the kernels that CUDA
    loads into it when they are first used (74 MiB on an H200): a rank's context has 500 MiB."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    import os

    import leaks
    import torch

    before, was_in_use = leaks.gpu_memory(), torch.cuda.is_initialized()
    yield
    assert leaks.until(lambda: not leaks.workers_of(os.getpid()), 5)
    if torch.cuda.is_initialized() == was_in_use:
        assert leaks.gpu_memory_left(before, varies=256 if was_in_use else 64) == {}


@pytest.fixture(autouse=True)
def readable_pictures(monkeypatch):
    """Fails a test in which a picture is made that has a text of too little contrast, two entries
    of a legend that not everybody can tell apart, or a title that is cut off."""
    from colour_difference import entries_alike
    from contrast import faint_texts
    from wide_texts import too_wide

    from labs.pictures.picture import Picture

    faint, alike, wide, init = [], [], [], Picture.__init__

    def look(picture, figure, *arguments, **named):
        init(picture, figure, *arguments, **named)
        faint.extend(faint_texts(figure))
        alike.extend(entries_alike(figure))
        wide.extend(too_wide(figure))

    monkeypatch.setattr(Picture, "__init__", look)
    yield
    assert not faint and not alike and not wide


@pytest.fixture(scope="session")
def needs_hosts():
    """Skips a test where this machine cannot have hosts of its own, and says why."""
    from labs.workers.hosts import hosts_unavailable

    if reason := hosts_unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def warm_launcher():
    """The first launch waits for those imports; no test's time should."""
    import labs

    labs.launch(int, ranks=1, quiet=True)


@pytest.fixture
def nothing_left(warm_launcher):
    """Fails the test when it leaves a worker process or a rendezvous file behind."""
    import os

    import leaks

    from labs.workers import processes

    shared = leaks.shared_memory()
    yield
    assert leaks.until(lambda: not leaks.workers_of(os.getpid()), 2)
    assert not [name for name in os.listdir(processes.private_directory())
                if name.startswith("rendezvous")]
    # What a test beside this one has killed leaves names for a moment, until its resource tracker
    # has seen it.
    assert leaks.until(
        lambda: leaks.shared_memory() - shared <= leaks.in_use_elsewhere(os.getpid()), 2)
