"""Plain data and functions of another process, without a sandbox: the other end is a thread."""

import inspect
import itertools
import json
import math
import os
import socket
import struct
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from _grade import plain_data, plain_kinds, remote
from _grade.plain_kinds import Malformed, NotPlain, Shared

from labs.checks.inputs import UnchangedInputs
from labs.checks.numbers import Single, as_list, as_number, require_signature
from labs.checks.verdicts import Verdict, Wrong, kind_of
from labs.meters.trace import Span


def sent(value):
    return plain_data.unpack(plain_data.pack(value))


def message(found, data: bytes = b"") -> bytes:
    text = found if isinstance(found, bytes) else json.dumps(found).encode()
    return struct.pack(">QQ", len(text), len(data)) + text + data


@pytest.mark.parametrize("value", [
    None, True, False, 0, -1, 2**53, -(2**200), 1.5, math.inf, -0.0, "", "ψ\n\ud800", b"\0\xff",
    1 + 2j, Fraction(1, 3), Decimal("0.1"), range(1, 9, 2), [], [1, [2, ()]], (), (1, "a", None),
    {}, {1: "a", (1, 2): [3], None: True, 1.5: {}}, {1, 2}, torch.float8_e5m2, torch.device("cpu"),
    ..., np.float32(1.5), np.int64(7), np.bool_(True)])
def test_a_value_comes_back_as_it_was(value):
    found = sent(value)
    assert found == value and type(found) is type(value)
    assert str(found) == str(value)


def test_nan_comes_back():
    assert math.isnan(sent(math.nan))


@pytest.mark.parametrize("dtype", plain_kinds.DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_a_tensor_of_any_dtype_comes_back(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = sent(tensor)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))


@pytest.mark.parametrize("array", [np.zeros((2, 3)), np.arange(6).reshape(2, 3).T, np.array(1),
                                   np.zeros((0, 2), "f"), np.array([True]), np.arange(3.)[::-1],
                                   np.arange(3, dtype=">i4")])
def test_an_array_comes_back(array):
    found = sent(array)
    assert found.shape == array.shape and (found == array).all() and found.flags.writeable


def test_tensors_keep_what_they_share():
    base = torch.arange(12.).reshape(3, 4)
    found = sent([base, base, base[1:], base.T, base.expand(2, 3, 4)])
    assert found[0] is found[1]
    found[0][1, 2] = 70
    assert found[2][0, 2] == found[3][2, 1] == found[4][1, 1, 2] == 70
    assert found[3].stride() == (1, 4) and found[4].stride() == (0, 4, 1)


def test_a_parameter_has_its_gradient():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    found = sent(weight)
    assert isinstance(found, torch.nn.Parameter) and found.requires_grad
    assert found.grad.tolist() == [2.0] * 3
    assert sent(weight * 2).requires_grad


def test_a_small_view_of_much_is_sent_alone():
    assert len(plain_data.pack(torch.zeros(10**7)[:3])) < 1000


class Shard(NamedTuple):
    size: int


@dataclass
class Own:
    size: int


class Percent(float):
    pass


def test_classes_of_the_students_become_what_they_are_made_of():
    assert sent(Shard(3)) == (3,) and type(sent(Shard(3))) is tuple
    assert sent(namedtuple("Pair", "a b")(1, 2)) == (1, 2)
    assert type(sent(Percent(0.5))) is float
    assert sent(OrderedDict(a=1)) == {"a": 1}
    assert kind_of(sent(Own(3))) == "an Own" and kind_of(sent(len)) == (
        "a builtin_function_or_method")
    with pytest.raises(NotPlain, match="test_remote.Own has no plain form"):
        plain_data.pack([Own(3)], strict=True)


def test_labs_own_classes_come_back():
    span = Span("step", "label", 1.0, 2.5)
    assert sent([span]) == [span] and type(sent(span)) is Span


def test_a_number_from_float32_counts_seven_digits():
    assert isinstance(as_number(sent(torch.tensor(0.1))), Single)
    assert isinstance(as_number(sent(np.float32(0.1))), Single)


def test_a_generator_is_read():
    assert as_list(sent(x * x for x in range(3))) == [0, 1, 4]
    assert as_list(sent(map(abs, [-1]))) == [1]


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(10**8), lambda: "x" * 10**8, lambda: 1 << 10**6, lambda: b"x" * 10**8,
    lambda: [0] * 2 * 10**6, lambda: (x for x in iter(int, 1)), lambda: nested(500),
    lambda: torch.zeros(1).expand(10**9)])
def test_what_is_too_large_has_no_plain_form(make):
    with pytest.raises(NotPlain):
        plain_data.pack(make())


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


TENSOR = ["tensor", "float32", 0, 0, [2], [1], False, False, None]


def of_tensor(**changes):
    names = ("kind", "dtype", "place", "offset", "shape", "stride", "requires", "parameter", "grad")
    return [changes.get(name, value) for name, value in zip(names, TENSOR, strict=True)]


STORAGE = (8).to_bytes(8, "big") + bytes(8)


def test_the_message_that_the_next_ones_change_is_read():
    assert plain_data.unpack(message(of_tensor(), STORAGE)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("data", [
    b"", b"x" * 16, struct.pack(">QQ", 1 << 60, 0), struct.pack(">QQ", 2, 1 << 63) + b"[]",
    message(b"{"), message(b"\xff"), message(b"[" * 10**6), message(b"[" * 500 + b"]" * 500),
    message(["list", 5]), message(["list"]), message([]), message({"a": 1}), message([1]),
    message(["nothing"]), message(["list", [], []]), message(b"9" * 10_000), message(1) + b"x",
    message(["list", [["list", [0] * 2_000_000]]]), message(["tuple", "ab"]),
    message(["int", "zz"]), message(["int", 5]), message(["int", "0x" + "f" * 10**6]),
    message(["bytes", -1]), message(["bytes", 10]), message(["bytes", True], b"x"),
    message(["bytes", 1.0], b"x"), message(["fraction", 1, 0]), message(["fraction", "1", 2]),
    message(["decimal", "x"]), message(["decimal", 5]), message(["range", 1, 2, 0]),
    message(["dict", [1], []]), message(["dict", [["list", []]], [1]]),
    message(["set", [["dict", [], []]]]), message(["dtype", "qint8"]), message(["dtype", ["x"]]),
    message(["device", "rm -rf"]), message(["same", 0]), message(["same", -1]),
    message(["other", "a b"]), message(["other", 5]), message(["other", "x" * 1000]),
    message(["array", "O", [1]], bytes(8)), message(["array", "d", [-1]]),
    message(["array", "d", [1 << 62, 4]]), message(["array", "d", [2.0]], bytes(16)),
    message(["array", "dd", [1]], bytes(16)), message(["scalar", "d", [2]], bytes(16)),
    message(["scalar", "M", []], bytes(8)), message(["array", "d", [0] * 100]),
    message(of_tensor(dtype="object"), STORAGE), message(of_tensor(place=1), STORAGE),
    message(of_tensor(place=-1), STORAGE), message(of_tensor(offset=1), STORAGE),
    message(of_tensor(offset=-1), STORAGE), message(of_tensor(shape=[3]), STORAGE),
    message(of_tensor(shape=[-2]), STORAGE), message(of_tensor(stride=[5]), STORAGE),
    message(of_tensor(stride=[-1]), STORAGE), message(of_tensor(stride=[1, 1]), STORAGE),
    message(of_tensor(shape=[1 << 61], stride=[0]), STORAGE),
    message(of_tensor(shape=[10**7, 10**7], stride=[0, 0]), STORAGE),
    message(of_tensor(shape=[True]), STORAGE), message(of_tensor(shape=None), STORAGE),
    message(of_tensor(shape=[2.0]), STORAGE), message(of_tensor(), STORAGE[:-1]),
    message(of_tensor(), (1 << 62).to_bytes(8, "big") + bytes(8)), message(of_tensor()),
    message(["object", "labs.checks.verdicts", "Verdict",
             ["exercise", "passed", "sentence", "hint", "printed", "code"],
             ["2.1", True, "right", "", "", ""]]),
    message(["object", "subprocess", "Popen", [], []]), message(["object", "os", "system", [], []]),
    message(["object", "labs.meters.trace", "Span", ["begin"], [1.0]]),
    message(["object", "labs.meters.trace", "Span", ["category", "name", "begin", "end"],
             ["a", "b", 1.0, 2.0]]),
    message(["object", "labs.meters.trace", "no", [], []]),
    message(["object", "labs.not.there", "Span", [], []]),
    message(["object", ["labs"], "Span", [], []]), message(["object", "labs.workers", 5, [], []]),
    message(["named", "labs.meters.trace", "Span", [1.0, 2.0]]),
    message(["member", "labs.meters.trace", "Span", "begin"])])
def test_a_hostile_message_is_malformed(data):
    with pytest.raises(Malformed):
        plain_data.unpack(data)


@pytest.fixture
def asked():
    """asked(*answers): proxies of functions that another thread calls."""
    threads, ends = [], []

    def answers(*functions):
        one, other = socket.socketpair()
        ends.append(one)
        threads.append(threading.Thread(
            target=remote.serve, args=(remote.Link(other.detach()), functions)))
        threads[-1].start()
        return remote.Remote(remote.Link(os.dup(one.fileno())), [__file__]).answers()

    yield answers
    for end in ends:
        end.shutdown(socket.SHUT_RDWR)
        end.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_function_is_called_with_what_the_judge_gives(asked):
    def double(numbers: list, *, by=2) -> list:
        """Doubles."""
        return [number * by for number in numbers]

    found, value = asked(double, (1, 2))
    assert value == (1, 2)
    assert found([1, 2], by=3) == [3, 6]
    assert (found.__name__, found.__doc__) == ("double", "Doubles.")
    assert str(inspect.signature(found)) == "(numbers: list, *, by=2)"
    with pytest.raises(Wrong, match=r"double\(a, b\) cannot be called"):
        require_signature(found, ("a", "b"))


def test_a_function_without_a_signature_can_be_called(asked):
    [found] = asked(max)
    assert found(1, 3) == 3
    require_signature(found, ("a", "b"))


def change(numbers, table, tensor, array):
    numbers.append(3)
    table["b"] = 2
    tensor.mul_(2)
    array[0] = 9
    return numbers, tensor


def test_a_changed_input_is_seen(asked):
    [found] = asked(change)
    inputs = {"numbers": [1, 2], "table": {"a": 1}, "tensor": torch.ones(2), "array": np.zeros(2)}
    kept = {name: UnchangedInputs("change", **{name: value}) for name, value in inputs.items()}
    _, tensor = found(*inputs.values())
    assert tensor is inputs["tensor"]
    for each in kept.values():
        with pytest.raises(Wrong, match="changed its input"):
            each.judge()
    assert inputs["numbers"] == [1, 2, 3] and inputs["table"] == {"a": 1, "b": 2}
    assert inputs["tensor"].tolist() == [2.0, 2.0] and inputs["array"].tolist() == [9.0, 0.0]


def test_an_input_that_is_only_read_stays(asked):
    [found] = asked(lambda x, more: x * 2)
    x = torch.ones(3)
    kept = UnchangedInputs("f", x=x)
    assert found(x, (n for n in [1])).tolist() == [2.0] * 3
    kept.judge()


def test_views_of_an_input_are_views_of_the_judges(asked):
    [found] = asked(lambda x: [x[:2], x[2:], x])
    x = torch.arange(4.0)
    first, second, same = found(x)
    assert same is x and first.data_ptr() == x.data_ptr() and second.tolist() == [2.0, 3.0]


def raises(error):
    def function():
        raise error
    return function


class OddError(Exception):
    pass


@pytest.mark.parametrize("error", [
    ValueError("so"), KeyError("a"), NotImplementedError("Exercise 2.1"), ZeroDivisionError(),
    IndexError("out of range"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), OSError(2, "no"),
    ExceptionGroup("two", [ValueError(1)]), StopIteration(3), AssertionError()])
def test_an_exception_is_raised_with_its_type_text_and_line(asked, error):
    [found] = asked(raises(error))
    with pytest.raises(type(error)) as caught:
        found()
    assert type(caught.value).__name__ == type(error).__name__
    assert str(caught.value) == str(error)
    assert caught.value.own_place.source == "raise error"


def test_other_exceptions_keep_their_name_alone(asked):
    odd, leaves, interrupts, malformed = asked(
        raises(OddError("x" * 10**6)), raises(SystemExit(3)), raises(KeyboardInterrupt()),
        raises(Wrong("all is right", code="x")))
    with pytest.raises(Exception) as caught:
        odd()
    assert type(caught.value).__name__ == "OddError" and len(str(caught.value)) < 5000
    with pytest.raises(SystemExit, match="3"):
        leaves()
    with pytest.raises(Exception) as caught:
        malformed()
    assert not isinstance(caught.value, Wrong)
    with pytest.raises(Exception) as caught:
        interrupts()
    assert not isinstance(caught.value, KeyboardInterrupt)


def test_what_cannot_be_sent_back_is_an_exception(asked):
    large, endless, breaks, grows = asked(
        lambda: torch.zeros(10**8), lambda: (0 for _ in iter(int, 1)),
        lambda: (1 / x for x in [0]), lambda x: x.append("x" * 10**8))
    for each, words in ((large, "larger than 64 MB"), (endless, "more than 1,000,000 parts")):
        with pytest.raises(RuntimeError, match=words):
            each()
    with pytest.raises(ZeroDivisionError):
        breaks()
    with pytest.raises(RuntimeError, match="larger than"):
        grows([])


def test_a_verdict_is_none_when_it_is_returned(asked):
    [found] = asked(lambda: Verdict("2.1", True, "right"))
    assert not isinstance(found(), Verdict)


def test_what_the_judge_cannot_send_is_its_own_mistake(asked):
    [found] = asked(lambda x: x)
    with pytest.raises(NotPlain):
        found(Own(3))


def test_the_judges_function_is_asked(asked):
    calls = []

    def gather(parameters, *, twice=False):
        calls.append(parameters)
        return parameters * (2.0 if twice else 1.5)

    [found] = asked(lambda sizes, by: [by(sizes[0]), by(parameters=sizes[1], twice=True)])
    assert found([2, 4], gather) == [3.0, 8.0] and calls == [2, 4]


def test_the_judges_function_raises_there(asked):
    def tries(by):
        try:
            return by()
        except TypeError as error:
            return str(error)

    [found] = asked(tries)
    assert "missing 1 required positional argument: 'parameters'" in found(lambda parameters: 1)


def test_an_iterator_that_never_ends_is_read_as_far_as_it_is_asked(asked):
    numbers, [found] = itertools.count(), asked(lambda gaps: [next(gaps) for _ in range(3)])
    assert found(numbers) == [0, 1, 2] and next(numbers) == 3
    [found] = asked(lambda gaps: (list(gaps), next(gaps, None)))
    assert found(iter([1.5, math.inf])) == ([1.5, math.inf], None)


def test_a_verdict_of_the_judges_iterator_is_raised_here(asked):
    def endless():
        yield 1
        raise Wrong("it read too much", code="endless_list")

    [found] = asked(lambda gaps: list(gaps))
    with pytest.raises(Wrong, match="it read too much"):
        found(Iterated(endless()))
    assert found(Iterated(iter([2]))) == [2]


class Iterated:
    """An iterator, and no generator: those are read before they are sent."""

    def __init__(self, values):
        self._values = values

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._values)


@pytest.fixture
def answered():
    """answered(*messages): a Remote whose other end has sent these."""
    ends = []

    def other(*messages):
        one, two = socket.socketpair()
        ends.extend([one, two])
        for each in messages:
            two.sendall(each)
        two.shutdown(socket.SHUT_WR)
        return remote.Remote(remote.Link(one.detach()), ["cell 1"])

    yield other
    for end in ends:
        end.close()


FUNCTION = ["function", "f", "f", None, [["x", 1, None, None]]]


def described(*answers) -> bytes:
    return plain_data.pack(["answers", list(answers)])


@pytest.mark.parametrize("first", [
    b"x" * 100, plain_data.pack(3), plain_data.pack([]), plain_data.pack(["answers"]),
    plain_data.pack(["answers", 3]), plain_data.pack(["verdict", True]),
    plain_data.pack([torch.zeros(2)]), described(FUNCTION[:-1]), described(3),
    described(["function", "f", "f", None, [["x", 9, None, None]]]),
    described(["function", "f", "f", None, [["a b", 1, None, None]]]),
    described(["function", "f", "f", None, [["x", 1, None, None]] * 2]),
    described(["function", "f", "f", None, [[1]]]), described(["function", "f", "f", None, 3])])
def test_answers_that_no_honest_process_describes_are_forged(answered, first):
    with pytest.raises(remote.Forged):
        answered(first).answers()


@pytest.mark.parametrize("then", [
    b"\xff" * 100, plain_data.pack("all is well"), plain_data.pack(["passed", "all is well", ""]),
    plain_data.pack(["returned"]), plain_data.pack(["returned", 1, 2]),
    plain_data.pack(["returned", 1, plain_data.pack([3, 4])]),
    plain_data.pack(["raised", 5, "", None, None]), plain_data.pack(["raised", "a b", "", 0, 0]),
    plain_data.pack(["raised", "ValueError"]), plain_data.pack(["asks", 0, [], {}]),
    plain_data.pack(["asks"]), plain_data.pack(["asks", "run", [], {}]),
    message(["list", ["returned", ["given", 0, False], None]])])
def test_results_that_no_honest_process_sends_are_forged(answered, then):
    [found] = answered(described(FUNCTION), then).answers()
    with pytest.raises(remote.Forged):
        found([1])


def test_a_line_of_no_cell_is_none(answered):
    results = [plain_data.pack(["raised", "ValueError", "no", place, None]) for place in (
        ["cell 1", 3, "f"], ["/etc/passwd", 1, "f"], ["cell 1", "3", "f"], [["cell 1"], 3, "f"])]
    [found] = answered(described(FUNCTION), *results).answers()
    for want in (True, False, False, False):
        with pytest.raises(ValueError, match="no") as caught:
            found(1)
        assert (caught.value.own_place is not None) == want


def test_a_process_that_ends_is_no_exception(answered):
    [found] = answered(described(FUNCTION)).answers()
    with pytest.raises(remote.Ended):
        found(1)
    assert not issubclass(remote.Ended, Exception) and not issubclass(remote.Forged, Exception)


def test_a_message_may_use_what_the_one_before_had():
    asked, answered = Shared(), Shared()
    x = torch.ones(3)
    plain_data.unpack(plain_data.pack([x], shared=asked))
    assert [each is x for each in asked.tensors] == [True] and answered.tensors == []
