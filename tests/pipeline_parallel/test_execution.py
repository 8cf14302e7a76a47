"""Schedules on real ranks: what is measured and drawn, and what torch's runtime makes of them."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules as torchs_schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import labs.pipeline_parallel as lab
from labs.meters import typical_step
from labs.meters.typical_step import NotTypical
from labs.pipeline_parallel import torch_pipelining
from labs.pipeline_parallel.measured_steps import PACE, MeasuredStep
from labs.pipeline_parallel.run_actions import draw_measured
from labs.pipeline_parallel.saved_bytes import SavedBytes
from labs.predictions.pipelines import schedules as known
from labs.predictions.pipelines.simulate import Times, simulate
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def one_f_one_b(ranks, micro_batches):
    return known.one_f_one_b(ranks, micro_batches)


def zb_h1(ranks, micro_batches):
    return known.zb_h1(ranks, micro_batches)


def _saved_by_a_sharded_mlp():
    """Bytes that a backward needs of two linear layers cut over two ranks; bytes after it."""
    mlp = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
    parallelize_module(mlp, init_device_mesh("cpu", (2,)),
                       {"0": ColwiseParallel(), "2": RowwiseParallel()})
    saved = SavedBytes(mlp.parameters())
    with saved.recording():
        output = mlp(torch.ones(3, 4)).sum()
    output.backward()
    return saved.peak, saved.now


def test_activations_of_dtensors_are_counted_once_and_weights_never():
    # The input of 3 x 4 and the activation between the layers of 3 x 8 / 2 numbers, 4 bytes each.
    assert launch(_saved_by_a_sharded_mlp, ranks=2, quiet=True, device="cpu") == [(96, 0)] * 2


@pytest.mark.slow
def test_a_measured_step_stands_below_its_simulation(monkeypatch):
    # Beside other programs it would not be drawn: what is asked here holds all the same.
    monkeypatch.setattr(typical_step, "is_typical", lambda *_: True)
    simulated, measured = lab.show_measured(zb_h1, ranks=2, micro_batches=3).data
    assert simulated.bubble == measured.bubble == pytest.approx(1 / 10)
    # Each action sleeps until it has taken PACE. The simulation goes by medians, so a disturbed
    # step may be shorter or longer than its own.
    for drawn in (simulated, measured):
        assert drawn.timeline.makespan >= 0.99 * 10 * PACE
    assert measured.held == pytest.approx(measured.peaks, rel=0.1)  # bytes beside their formula


@pytest.mark.parametrize("lengths, drawn", [((0.9, 1, 1.2), True), ((1, 1, 9), True), ((), True),
                                            ((0.6, 1, 1.2), False), ((0.3, 0.9, 0.9), False)])
def test_a_shortest_step_unlike_the_others_is_not_drawn(lengths, drawn):
    schedule = known.one_f_one_b(2, 2)
    times = Times([1.0] * 2, [2.0] * 2, [0.0] * 2)
    step = MeasuredStep(schedule, simulate(schedule, times), times, [1] * 2, [1] * 2, 1.0, 0.0,
                        lengths)
    if drawn:
        assert "bubble" in str(draw_measured(step, "one_f_one_b"))
        return
    with pytest.raises(NotTypical, match="not drawn, .* run this cell again when it is quieter"):
        draw_measured(step, "one_f_one_b")


@pytest.mark.slow
def test_every_runtime_has_the_same_losses():
    table = lab.show_runtimes(one_f_one_b, zb_h1)
    names = [row[0] for row in table.rows]
    assert names[:4] == ["one_f_one_b, our runner", "one_f_one_b, torch's runtime",
                         "zb_h1, our runner", "zb_h1, torch's runtime"]
    assert [name for name in names if "torch's Schedule" in name] == [
        f"torch's {name}" for name in torch_pipelining.CLASSES]
    assert all(float(row[-1]) < 1e-5 for row in table.rows)


@pytest.mark.parametrize("other", [None, type("Runtime", (), {}), type("Runtime", (), {
    "_load_csv": lambda self, path: None})])
def test_where_torch_has_no_runtime_for_lists_ours_takes_them(monkeypatch, other):
    schedule = known.zb_h1(2, 4)
    assert torch_pipelining._torchs_runtime(schedule) is not None
    monkeypatch.delattr(torchs_schedules, "_PipelineScheduleRuntime")
    if other:
        monkeypatch.setattr(torchs_schedules, "_PipelineScheduleRuntime", other, raising=False)
    assert torch_pipelining._torchs_runtime(schedule) is None


def test_pictures_on_ranks_wait_for_what_is_not_filled_in():
    def unfilled(*_):
        raise NotImplementedError("Exercise 7.18")

    assert lab.show_training(unfilled, one_f_one_b, ranks=2, micro_batches=2).passed is None
    assert lab.show_training(lambda *_: 0.0, unfilled).passed is None
    assert lab.show_measured(unfilled).passed is None
    assert lab.show_split(unfilled, [1.0, 2.0], ranks=2).passed is None
    assert lab.show_runtimes(one_f_one_b, unfilled).passed is None
