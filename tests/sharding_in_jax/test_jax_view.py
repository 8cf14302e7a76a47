"""JAX's view: its own process, the collectives of compiled programs, and the pictures. Without JAX
only what needs none is tested."""

import os
import re
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path

import cloudpickle
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

import labs
import labs.sharding_in_jax as lab
from labs.checks.verdicts import Verdict
from labs.sharding_in_jax import jax_and_torch, jax_layouts, jax_process
from labs.sharding_in_jax import layouts as device_pieces
from labs.sharding_in_jax.jax_and_torch import torch_collectives
from labs.sharding_in_jax.jax_layouts import MeasuredLayout, Pieces
from labs.workers.launch_error import Stopped

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).resolve().parents[2]
needs_jax = pytest.mark.skipif(not jax_process.has_jax(),
                               reason="JAX is not installed (the extra `jax`)")


def layouts():
    from jax.sharding import PartitionSpec as P

    return {"DDP": {"x": P("n"), "up": P(), "down": P(), "y": P("n")},
            "FSDP": {"x": P("n"), "up": P("n"), "down": P("n"), "y": P("n")},
            "TP": {"x": P(), "up": P(None, "n"), "down": P("n"), "y": P()}}


@pytest.fixture(autouse=True)
def jax_stays_outside():
    """Fails a test in which this process imports JAX, or that leaves JAX's process behind."""
    yield
    assert "jax" not in sys.modules
    assert not [child for child in psutil.Process().children(recursive=True)
                if "sharding_in_jax.jax_child" in " ".join(child.cmdline())]


# its process


@needs_jax
def test_what_a_function_prints_is_shown_and_what_it_returns_comes_back(capfd):
    offset = 3

    def count():
        import jax

        print("in another process:", os.getpid())
        return {"devices": len(jax.devices()), "sum": jax.numpy.ones(2) + offset}

    found = lab.run_jax(count, devices=8)
    assert found["devices"] == 8 and isinstance(found["sum"], numpy.ndarray)
    assert found["sum"].tolist() == [4, 4]
    printed = capfd.readouterr().out
    assert "in another process" in printed and str(os.getpid()) not in printed


@needs_jax
@pytest.mark.parametrize(("problem", "words"), [
    ("spec", "an object of JAX's own, a jax.*return numbers"),
    ("leaves", "exit code 3, and returned nothing\n.*the last words")])
def test_what_goes_wrong_there_is_a_sentence(problem, words):
    def spec():
        from jax.sharding import PartitionSpec

        return [PartitionSpec("n")]

    def leaves():
        print("the last words", flush=True)
        os._exit(3)

    verdict = lab.run_jax(locals()[problem])
    assert verdict.passed is False and re.search(words, str(verdict), re.DOTALL), str(verdict)


@needs_jax
def test_a_function_without_end_is_stopped():
    began = time.monotonic()
    verdict = lab.run_jax(time.sleep, 100, seconds=1)
    assert "stopped: it took more than 1 s" in str(verdict) and time.monotonic() - began < 20


@needs_jax
def test_an_interrupt_stops_the_process():
    threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(Stopped, match="interrupted"):
        lab.run_jax(time.sleep, 100, seconds=30)


@needs_jax
def test_what_cannot_travel_is_named():
    lock = threading.Lock()
    with pytest.raises(labs.LaunchError, match="cannot be sent to JAX's process"):
        lab.run_jax(lambda: lock)


def test_without_jax_one_sentence_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(jax_process, "has_jax", lambda: False)
    verdicts = [lab.check_layouts(layouts), lab.show_layouts(layouts),
                lab.show_collectives(layouts), lab.run_jax(layouts)]
    assert [str(verdict).split("JAX")[0] for verdict in verdicts] == [
        "○ Exercise 7.26  waits for ", "○ run_jax  waits for ", "○ run_jax  waits for ",
        "○ run_jax  waits for "]
    assert all(f"%pip install jax=={jax_process.VERSION}" in str(verdict) for verdict in verdicts)
    assert lab.show_omitted_sums([[], []], verdicts[-1:] * 2) is verdicts[-1]


def test_the_version_that_is_named_is_the_pinned_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["jax"] == [f"jax=={jax_process.VERSION}"]
    pins = (ROOT / "requirements.lock").read_text()
    assert f'\njax=={jax_process.VERSION} ; extra == "jax"' in pins


# what is measured


TEXT = """
  %all-gather = f32[64,256]{1,0} all-gather(%param.1), channel_id=1, replica_groups={{0,1}}
  %all-reduce = (f32[], bf16[256,64]{1,0}) all-reduce(%a, %b), to_apply=%add.clone
  %get = f32[] get-tuple-element(%all-reduce), index=0
  ROOT %tuple = (f32[], bf16[256,64]{1,0}) tuple(%get, %all-gather)
"""


def test_collectives_are_read_from_the_programs_text():
    class Compiled:
        def as_text(self):
            return TEXT

    found = jax_layouts.collectives(Compiled())
    assert [(one.kind, one.bytes) for one in found] == [
        ("all_gather", 64 * 256 * 4), ("all_reduce", 4 + 256 * 64 * 2)]


def test_torchs_classes_call_what_their_layouts_need():
    weights, tokens = 4 * 2 * 64 * 256, 4 * 1024 * 64
    found = {name: [(call.kind, call.bytes) for call in calls]
             for name, calls in torch_collectives().items()}
    assert found == {
        "DDP": [("all_reduce", weights)],
        "FSDP": [("all_gather", weights)] * 2 + [("reduce_scatter", weights)],
        "TP": [("all_reduce", tokens)] * 2}


@needs_jax
@pytest.mark.slow
def test_the_table_gives_a_reason_for_each_difference():
    table = lab.show_collectives(layouts)
    assert [row[1:] for row in table.rows] == [
        ("all-reduce", "1 call, 131,076 bytes", "1 call, 131,072 bytes",
         "and the mean loss of all tokens, 4 bytes"),
        ("all-gather", "2 calls, 131,072 bytes", "2 calls, 262,144 bytes",
         "torch gathers once more for backward"),
        ("reduce-scatter", "none", "1 call, 131,072 bytes", "XLA forms none on a CPU"),
        ("all-reduce", "1 call, 131,076 bytes", "none", "reduces all, then keeps its piece"),
        ("all-reduce", "2 calls, 524,288 bytes", "2 calls, 524,288 bytes", "")]


def gathered_under_checkpoint():
    import jax
    from jax.sharding import PartitionSpec as P

    jax.set_mesh(jax.make_mesh((4,), ("n",)))

    @jax.checkpoint
    def loss(x, up, down):
        return (jax_layouts.block_forward(x, up, down, P("n"))[1] ** 2).mean()

    arrays = lab.place_arrays(layouts()["FSDP"])
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile()
    return jax_layouts.collectives(compiled)


@needs_jax
def test_under_checkpoint_jax_gathers_weights_twice_as_the_notebook_says():
    found = lab.run_jax(gathered_under_checkpoint)
    gathered = [one.bytes for one in found if one.kind == "all_gather"]
    assert gathered == [65536] * 4


@needs_jax
@pytest.mark.slow
def test_the_picture_shows_what_each_device_holds_and_what_jax_refuses():
    def two_axes():
        from jax.sharding import PartitionSpec as P

        return {"both": {"x": P("data"), "up": P("data", "tensor"), "down": P("tensor", "data"),
                         "y": P("data")},
                "impossible": {"x": P("data"), "up": P(None, "data"), "down": P(), "y": P()}}

    picture = lab.show_layouts(two_axes, {"data": 2, "tensor": 4})
    both = picture.data["both"]
    assert both.types["h"] == "float32[1024@data,256@tensor]" and both.difference < 1e-5
    assert sorted(map(tuple, both.pieces["x"].holders().values())) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert both.pieces["up"].by_device[5] == ((32, 64), (64, 128))
    drawn = {text.get_text() for text in picture.figure.axes[0].texts}
    assert {"0 1 2 3", "4 5 6 7", *"01234567"} <= drawn
    assert any(text.startswith("JAX refuses it: ShardingTypeError") for text in drawn)
    assert repr(picture).endswith("impossible: refused")


def test_devices_that_have_no_room_are_named_by_the_first_and_the_last():
    assert device_pieces._names([0, 1, 2, 3], 0.3) == "0–3"
    assert device_pieces._names([0, 4], 0.4) == "0 4"
    pieces = Pieces((4, 2), {0: ((0, 2), (0, 2)), 1: ((2, 4), (0, 2))})
    assert pieces.bytes(1) == 16 and pieces.holders() == {((0, 2), (0, 2)): [0],
                                                          ((2, 4), (0, 2)): [1]}


# a sum that is left out


def left_out(with_sum):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, up, down = (torch.tensor(array) for array in lab.block_arrays().values())
    x.requires_grad_()
    y = torch.relu(x @ up.chunk(ranks, 1)[rank]) @ down.chunk(ranks)[rank]
    if with_sum:
        total = y.detach().clone()
        dist.all_reduce(total)
        y = y + (total - y).detach()
    loss = y.square().mean()
    loss.backward()
    return loss.item(), x.grad.numpy()


def in_pieces(with_sum, checked=True):
    import jax
    from jax.sharding import PartitionSpec as P

    jax.set_mesh(jax.make_mesh((4,), ("n",)))

    def on_each_device(x, up, down):
        y = jax.nn.relu(x @ up) @ down
        return jax.lax.psum(y, "n") if with_sum else y

    block = jax.shard_map(on_each_device, out_specs=P(), check_vma=checked)
    x, up, down = lab.place_arrays({"x": P(), "up": P(None, "n"), "down": P("n")})
    return jax.value_and_grad(lambda x: (block(x, up, down) ** 2).mean())(x)


@needs_jax
@pytest.mark.slow
def test_torch_is_silent_where_jax_refuses_or_adds_the_sum():
    torchs = [labs.launch(left_out, with_sum, ranks=4, quiet=True, device="cpu")
              for with_sum in (False, True)]
    # check_vma=False, without psum: with its check switched off, JAX is as silent as torch.
    added, silent = lab.run_jax(lambda: (in_pieces(True), in_pieces(False, checked=False)))
    jaxs = [lab.run_jax(in_pieces, False), added]
    table = lab.show_omitted_sums(torchs, jaxs)
    (_, forward, refused), (_, backward, derived) = table.rows
    assert forward.startswith("no error; the loss is wrong by") and "by 0%" not in forward
    assert backward.startswith("no error; the gradient is wrong by") and "by 0%" not in backward
    assert refused == "ValueError, before anything runs" and "JAX adds it" in derived
    loss, gradient = jax_and_torch.right_loss_and_gradient()
    assert all(abs(found - loss) < 1e-5 for found, _ in torchs[1])  # forward was right there
    assert added[0] == pytest.approx(loss, rel=1e-5)
    numpy.testing.assert_allclose(added[1], gradient, atol=1e-5 * abs(gradient).max())
    assert silent[0] < 0.7 * loss


def test_a_function_that_fails_in_another_way_is_shown_in_the_tables_place():
    failed = Verdict("run_jax", False, "NameError: x")
    assert lab.show_omitted_sums([[], []], [failed, failed]) is failed
    assert not MeasuredLayout({}).pieces
