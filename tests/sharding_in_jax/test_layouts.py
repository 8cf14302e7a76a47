"""What the check of exercise 7.26 must reject, and what it must accept. All answers are measured in
one process of JAX's; `pytest -s` prints the verdict of each wrong answer."""

import sys
from unittest import mock

import cloudpickle
import pytest
from answers import assert_rejected, assert_waits

import labs.sharding_in_jax as lab
from labs.checks.verdicts import Wrong
from labs.sharding_in_jax import jax_layouts
from labs.sharding_in_jax import layouts as checking
from labs.sharding_in_jax.jax_layouts import CompiledCollective, MeasuredLayout, Pieces
from labs.sharding_in_jax.jax_process import has_jax

cloudpickle.register_pickle_by_value(sys.modules[__name__])
needs_jax = pytest.mark.skipif(not has_jax(), reason="JAX is not installed (the extra `jax`)")


def right():
    from jax.sharding import PartitionSpec as P

    return {"DDP": {"x": P("n"), "up": P(), "down": P(), "y": P("n")},
            "FSDP": {"x": P("n"), "up": P("n"), "down": P("n"), "y": P("n")},
            "TP": {"x": P(), "up": P(None, "n"), "down": P("n"), "y": P()}}


def but(layout, **specs):
    """The right answer but for some arrays of one layout; a spec is given as a tuple."""
    def layouts():
        from jax.sharding import PartitionSpec as P

        found = right()
        found[layout].update({array: P(*spec) for array, spec in specs.items()})
        return found

    return layouts


def everything_whole():
    from jax.sharding import PartitionSpec as P

    return {name: dict.fromkeys(("x", "up", "down", "y"), P()) for name in right()}


def ddp_three_times():
    return dict.fromkeys(right(), right()["DDP"])


def fsdp_for_tp():
    return right() | {"TP": right()["FSDP"]}


def tp_for_fsdp():
    return right() | {"FSDP": right()["TP"]}


def without_tp():
    return {name: specs for name, specs in right().items() if name != "TP"}


def without_y():
    return {name: {array: spec for array, spec in specs.items() if array != "y"}
            for name, specs in right().items()}


def words():
    return {name: dict.fromkeys(specs, "n") for name, specs in right().items()}


def nothing():
    return None


def a_list():
    return list(right().values())


def lists():
    return {name: list(specs.values()) for name, specs in right().items()}


def never_summed():
    """A spec that says that y's sum is left out."""
    from jax.sharding import PartitionSpec as P

    return right() | {"TP": right()["TP"] | {"y": P(unreduced={"n"})}}


W = [
    (everything_whole, "wrong_pieces"),
    (ddp_three_times, "wrong_pieces"),
    (fsdp_for_tp, "wrong_pieces"),
    (tp_for_fsdp, "wrong_pieces"),
    (but("DDP", up=("n",), down=("n",)), "wrong_pieces"),
    (but("DDP", y=()), "wrong_pieces"),
    (but("FSDP", up=()), "wrong_pieces"),
    (but("FSDP", down=()), "wrong_pieces"),
    (but("FSDP", up=(None, "n")), "layout_refused FSDP"),
    (but("TP", up=("n",), down=(None, "n")), "wrong_pieces"),
    (but("TP", down=(None, "n")), "wrong_pieces"),
    (but("TP", x=("n",)), "layout_refused"),
    (but("TP", y=("n",)), "wrong_pieces"),
    (but("TP", x=(None, "n")), "wrong_pieces"),
    (but("DDP", x=("m",)), "layout_refused DDP"),
    (but("DDP", x=(None, None, "n")), "wrong_count"),
    (without_tp, "missing_keys"),
    (without_y, "wrong_keys"),
    (words, "wrong_type PartitionSpec"),
    (nothing, "wrong_type nothing"),
    (lists, "wrong_type array"),
    (never_summed, "layout_refused"),
    (a_list, "wrong_type layouts"),
]


def other_words_for_the_same():
    """Dimensions that are not cut may be named, an axis may stand in a tuple, order is free."""
    from jax.sharding import PartitionSpec as P

    return {"TP": {"y": P(None, None), "x": P(None), "up": P(None, ("n",)), "down": P("n", None)},
            "FSDP": {"x": P("n", None), "up": P(("n",)), "down": P("n", None), "y": P("n", None)},
            "DDP": {"x": P(("n",)), "up": P(None, None), "down": P(None), "y": P("n")}}


def columns_of_down():
    """FSDP may cut a weight along any dimension that JAX accepts."""
    return but("FSDP", down=(None, "n"))()


def one_more():
    return right() | {"mine": right()["DDP"]}


RIGHT_ANSWERS = [right, other_words_for_the_same, columns_of_down, one_more]


def measure_each(answers, mesh):
    """In JAX's process: what is found of each answer; the same specs are compiled once."""
    measure_one, found = jax_layouts._measured, {}

    def once(specs, expected):
        key = repr(sorted((name, str(spec)) for name, spec in specs.items()))
        if key not in found:
            found[key] = measure_one(specs, expected)
        return found[key]

    with mock.patch.object(jax_layouts, "_measured", once):
        return [jax_layouts.measure(answer, mesh) for answer in answers]


@pytest.fixture(scope="module")
def measured():
    """Answer -> what JAX's process found of it."""
    answers = [answer for answer, _ in W] + RIGHT_ANSWERS
    found = lab.run_jax(measure_each, answers, {"n": 4}, seconds=400)
    return dict(zip(answers, found, strict=True))


@pytest.fixture
def verdict_on(measured, monkeypatch):
    def verdict(answer):
        monkeypatch.setattr(checking, "in_jax_process", lambda *_, **__: measured[answer])
        return lab.check_layouts(answer)

    return verdict


@needs_jax
@pytest.mark.parametrize(("answer", "words"), W, ids=[
    f"{number}-{answer.__name__}" for number, (answer, _) in enumerate(W)])
def test_wrong_layouts_are_rejected(verdict_on, answer, words):
    verdict = verdict_on(answer)
    print(verdict)
    assert_rejected(verdict, words)


@needs_jax
@pytest.mark.parametrize("answer", RIGHT_ANSWERS)
def test_right_layouts_are_accepted(verdict_on, answer):
    verdict = verdict_on(answer)
    assert verdict.passed, str(verdict)


@needs_jax
def test_a_gap_waits():
    assert_waits(lab.check_layouts, "7.26")


@needs_jax
def test_an_error_in_the_answer_is_shown_with_its_line():
    def layouts():
        return {"DDP": {"x": P("n")}}  # noqa: F821

    assert_rejected(lab.check_layouts(layouts), "raised_NameError")


def with_collectives(name, *found):
    """A measured layout whose arrays lie as they should, with these collectives."""
    shapes = {"x": (1024, 64), "up": (64, 256), "h": (1024, 256), "down": (256, 64),
              "y": (1024, 64)}
    return MeasuredLayout({}, {array: _cut(shape, checking._CUT[name][array])
                               for array, shape in shapes.items()},
                          dict.fromkeys(shapes, ""), [CompiledCollective(*one) for one in found])


def _cut(shape, cut):
    cut = 0 if cut == "any" else cut
    return Pieces(shape, {device: tuple(
        (size // 4 * device, size // 4 * (device + 1)) if number == cut else (0, size)
        for number, size in enumerate(shape)) for device in range(4)})


@pytest.mark.parametrize(("name", "found", "words"), [
    ("DDP", [("all_gather", 65536)], "DDP: the compiled program gathers 65,536 bytes in 1 coll"),
    ("DDP", [("all_reduce", 262144)], "DDP: .*reduces 262,144 bytes .*needs 131,072"),
    ("FSDP", [("all_gather", 131072)] * 3, "FSDP: .*gathers 393,216 bytes in 3 .*needs 262,144"),
    ("TP", [("all_reduce", 262144)] * 3, "TP: .*reduces 786,432 bytes"),
    ("TP", [("all_to_all", 65536)], "TP: the compiled program gathers 65,536")])
def test_collectives_that_a_layout_does_not_need_are_rejected(name, found, words):
    with pytest.raises(Wrong, match=words):
        checking._judge_pieces(name, with_collectives(name, *found), checking._CUT[name])
        checking._judge_collectives(name, with_collectives(name, *found))
