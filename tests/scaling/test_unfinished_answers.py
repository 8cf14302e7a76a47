"""Notebook 06: a picture of an answer that is not finished says in a sentence what it waits for."""

import json
import random
import warnings

import pytest

import labs.scaling as lab
from labs.checks.verdicts import Verdict
from labs.scaling import link_recordings, lost_time_traces, synthetic_jobs
from labs.scaling.lost_time_runs import RunsOnRanks
from labs.scaling.started_jobs import StartedJob

ANSWERS = {"nothing": None, "an empty dictionary": {}, "a number": 3, "a text": "a",
           "zeros": (0, 0), "three zeros": (0,) * 3, "four zeros": (0,) * 4,
           "three numbers": (1, 2, 3), "no numbers": (float("nan"),) * 2,
           "a list of nothing": [None, None], "a name and no numbers": ("DDP", {}),
           "a number for a name": (1, {"reduced": 1})}


def job(ranks):
    _, _, evidence = synthetic_jobs._job(random.Random(0), "DDP",
                                         synthetic_jobs._TRAFFIC["DDP"][0], ranks)
    return evidence


def shown(answer):
    """Name of a picture -> a call that draws it by the answer."""
    runs = json.loads(link_recordings.RECORDING.read_text(encoding="utf-8"))["runs"]
    links = link_recordings.link_run(runs["all-reduces"])
    run, alone = lost_time_traces.cases()["one all-reduce"]
    own = lab.reported_run("mosaic-096")
    runs_on_ranks = RunsOnRanks({"one": run}, alone, None)
    jobs = {"--cpu": StartedJob(job(2), [1.0], 1.0)}
    return {
        "show_lost_time": lambda: lab.show_lost_time(runs_on_ranks, answer),
        "show_fit": lambda: lab.show_fit(answer, links),
        "show_choice": lambda: lab.show_choice(answer),
        "show_utilization": lambda: lab.show_utilization(answer, own),
        "show_steps": lambda: lab.show_steps(answer),
        "show_calibrated": lambda: lab.show_calibrated(answer),
        "show_fastest": lambda: lab.show_fastest(answer),
        "show_jobs": lambda: lab.show_jobs(jobs, answer),
        "show_costs": lambda: lab.show_costs(answer, own, 0.05),
        "show_budget": lambda: lab.show_budget(answer),
        "show_spot": lambda: lab.show_spot(answer)}


# A number, or no strategy, may be an answer; a picture of it is drawn.
DRAWN = {("show_choice", "nothing"), ("show_calibrated", "zeros")}


@pytest.mark.parametrize("returned", ANSWERS)
@pytest.mark.parametrize("name", shown(None))
def test_an_unfinished_answer_gets_a_sentence(name, returned):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = shown(lambda *_: ANSWERS[returned])[name]()
        if (name, returned) in DRAWN:
            assert not isinstance(found, Verdict), found
            return
    assert isinstance(found, Verdict) and found.passed is False
    assert "returned" in found.sentence and "\n" not in found.sentence, found


def test_a_step_without_gradients_gets_a_sentence(warm_launcher):
    found = lab.show_ragged(lambda module, micro_batches: None)
    assert found.passed is False and "has no gradient" in found.sentence, found
