"""Scripts that exercise 5.11 must reject, and right ones written differently."""

import pytest
from answers import assert_rejected, with_changes

import labs.fsdp_profiling as lab
from labs.checks.scripts import files

pytestmark = pytest.mark.usefixtures("warm_launcher")
RIGHT = files.worked_script("profile_fsdp.py")


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


STEP = "            profiler.step()\n"
PATH = 'f"{options.traces}/rank_{dist.get_rank()}.json.gz"'

WRONG = {
    "nothing recorded": (changed(("    with profiler:\n", "    if True:\n"), (STEP, "")),
                         "wrong_files"),
    "no step": (changed((STEP, "")), "wrong_files|wrong_steps"),
    "numbers of its own": (changed(("wait=options.wait, warmup=options.warmup, active="
                                    "options.active", "wait=1, warmup=1, active=3")),
                           "wrong_steps"),
    "no warm-up": (changed(("wait=options.wait, warmup=options.warmup",
                            "wait=options.wait, warmup=1")), "wrong_steps"),
    "no schedule": (changed((", schedule=schedule(\n        wait=options.wait, warmup="
                             "options.warmup, active=options.active, repeat=1))", ")")),
                    "wrong_steps"),
    "no stacks": (changed(("with_stack=True, ", "")), "no_stacks"),
    "one name for all": (changed((PATH, 'f"{options.traces}/trace.json.gz"')), "wrong_files"),
    "rank 0 alone writes": (changed(("        profiler.export", "        dist.get_rank() or "
                                     "profiler.export")), "wrong_files"),
    "a name of each call": (changed(
        (PATH, 'f"{options.traces}/rank_{dist.get_rank()}_{profiler.step_num}.json.gz"'),
        (", repeat=1))", "))"), ('"steps": 8', '"steps": 8')), "wrong_files|wrong_steps|none"),
    "no label": (changed(('            with record_function("backward"):\n',
                          "            if True:\n")), "missing_label backward"),
    "trains while it records alone": (changed(("        for tokens in batches:\n",
                                               "        for tokens in batches[:4]:\n")),
                                      "wrong_count"),
    "the GPU alone": (changed(("profile(with_stack", "profile(activities=[torch.profiler."
                               "ProfilerActivity.CUDA], with_stack")),
                      "raised_|wrong_steps|missing_label|rank_failed|raised_AssertionError"
                      "|raised_RuntimeError|raised_ValueError|wrong_files")}

RIGHT_ONES = {
    "worked": RIGHT,
    "not compressed": changed((".json.gz", ".json")),
    "activities, shapes and memory": changed((
        "profile(with_stack", "profile(activities=[torch.profiler.ProfilerActivity.CPU], "
        "record_shapes=True, profile_memory=True, with_stack")),
    "started and stopped": changed(("    with profiler:\n", "    profiler.start()\n    if True:\n"),
                                   (STEP, STEP + "    profiler.stop()\n"))}


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def judged(script):
        (tmp_path / "profile_fsdp.py").write_text(script)
        return lab.check_profile_fsdp("profile_fsdp.py")

    return judged


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_is_rejected(check, name):
    script, expected = WRONG[name]
    assert_rejected(check(script), expected)


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_a_right_script_passes(check, name):
    verdict = check(RIGHT_ONES[name])
    assert verdict.passed, str(verdict)


def test_a_gap_and_a_missing_file_wait(check):
    assert lab.check_profile_fsdp("none.py").passed is None
    verdict = check(RIGHT + '\nraise NotImplementedError("Exercise 5.11")\n')
    assert verdict.passed is None and "5.11" in str(verdict)
