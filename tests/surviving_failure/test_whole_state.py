"""The job that notebook 08 saves and resumes, what is shown of it, and the kills."""

import sys

import cloudpickle
import pytest
import torch
from _build.definitions import definitions
from torch.nn.parallel import DistributedDataParallel

import labs.surviving_failure as lab
from labs.surviving_failure.forgotten import LEFT_OUT, STEPS_AFTER_RESUME
from labs.surviving_failure.killed_runs import Answer, Kill, killed_and_resumed
from labs.surviving_failure.resumable_job import BATCH, KINDS, VOCABULARY, TextModel, new_job
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
solution = definitions("08_surviving_failure")
zero3 = definitions("03_zero_stages").zero3


def begin():
    """(Kind -> first losses, gradients that are there, elements of ZeRO-3's flat parameters)."""
    losses, gradients = {}, 0
    for kind in KINDS:
        job = new_job(kind, zero3=zero3)
        gradients += sum(p.grad is not None for p in job.module.parameters())
        losses[kind] = job.train(2)
    return losses, gradients, [unit.elements for unit in job.module.units]


def test_all_kinds_begin_alike():
    first, second = launch(begin, ranks=2, quiet=True)
    assert [len(set(each)) for each in zip(*first[0].values(), strict=True)][0] == 1
    assert first[0]["DDP"] != second[0]["DDP"]  # ranks draw other numbers
    assert first[1] == 0
    assert first[2][0] == 3434 and VOCABULARY == 101 and BATCH == 12  # the notebook's text


def new_orders():
    """Whether DDP makes other buckets after a first pass: by itself, and in a job."""
    tokens, found = torch.zeros(1, 8, dtype=torch.long), []
    for module in (DistributedDataParallel(TextModel(0)), new_job("DDP").module):
        module(tokens, tokens).loss.backward()
        found.append(module.reducer._rebuild_buckets())
    return found


def test_ddp_orders_its_bucket_anew_after_the_first_step():
    """Why the job makes two passes before it begins. If torch no longer does this, the notebook's
    sentence goes."""
    assert launch(new_orders, ranks=2, quiet=True)[0] == [True, False]


def test_what_is_left_out_shows_in_the_losses_that_the_notebook_names():
    picture = lab.show_forgotten()
    rows = {what: [not off for off in distances] for what, distances in picture.data.items()}
    assert list(rows) == list(LEFT_OUT) and rows["nothing"] == [True] * STEPS_AFTER_RESUME
    assert rows["the moments"][:2] == [True, False]
    assert rows["the schedule"][:3] == [True, True, False]
    assert not any(rows[what][0] for what in LEFT_OUT[3:])


def test_the_resumed_curve_lies_on_the_other(nothing_left):
    picture = lab.show_resumed(solution.job_state, solution.load_job_state)
    resumed, uninterrupted, forgotten = picture.data
    assert resumed == uninterrupted and "Resumed, a loss differs by at most 0;" in repr(picture)
    rest = uninterrupted[-len(forgotten):]
    assert forgotten[0] == rest[0] and max(
        abs(a - b) for a, b in zip(forgotten, rest, strict=True)) > 0.01


def test_a_gradient_that_is_there_loses_the_moments():
    """FACTS of torch 2.13: get_state_dict takes the optimizer for one that has made steps."""
    rows = lab.show_stale_gradient(solution.save_dcp, solution.load_dcp).rows
    assert rows[0][1:] == ("equal",) * STEPS_AFTER_RESUME
    assert rows[1][1] == "equal" and "equal" not in rows[1][2:4]


def fails(job):
    raise ValueError("full")


def test_a_job_that_ends_by_itself_is_no_kill(tmp_path):
    with pytest.raises(RankFailed, match="full"):
        killed_and_resumed(Answer(fails, solution.load_job_state, zero3), 2, [Kill(1, 3, 0)], 5,
                           tmp_path, ("DDP",))


@pytest.mark.slow
def test_on_other_ranks_losses_differ_in_their_last_digits_only():
    rows = lab.show_other_ranks(solution.save_shards, solution.load_shards, zero3).rows
    assert rows[0] == (4, *("equal",) * 4)
    assert all(cell == "equal" or float(cell) < 2e-6 for row in rows for cell in row[1:])
