"""What the check of exercise 2.10 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits
from torch.nn.parallel import DistributedDataParallel

import labs.manual_ddp as lab
from labs.training.presets import preset

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("02_manual_ddp", PRESET=preset("laptop"))


class Wrap:
    def default_cap(model, cap_bytes):
        return DistributedDataParallel(model)

    def the_students_own(model, cap_bytes):
        return right.overlapped(model, cap_bytes)

    def unwrapped(model, cap_bytes):
        return model

    def bytes_as_mib(model, cap_bytes):
        return DistributedDataParallel(model, bucket_cap_mb=cap_bytes)

    def in_mb(model, cap_bytes):
        return DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 1e6)

    def whole_mib(model, cap_bytes):
        return DistributedDataParallel(model, bucket_cap_mb=max(1, cap_bytes // 2**20))

    def a_child(model, cap_bytes):
        return DistributedDataParallel(next(model.children()), bucket_cap_mb=cap_bytes / 2**20)


def shares(communication, phases):
    return right.communication_shares(communication, phases)


def with_ratio(answer):
    """The right overlapped share, and this ratio."""
    return lambda communication, phases: (answer(communication, phases),
                                          shares(communication, phases)[1])


def with_overlap(answer):
    """The right ratio, and this overlapped share."""
    return lambda communication, phases: (shares(communication, phases)[0],
                                          answer(communication, phases))


class Ratio:
    def exposed_alone(communication, phases):
        return phases["exposed"] / (sum(phases.values()) - phases["exposed"])

    def of_the_step(communication, phases):
        return communication / sum(phases.values())

    def overlap_subtracted(communication, phases):
        return communication / (sum(phases.values()) - communication)

    def inverted(communication, phases):
        return (sum(phases.values()) - phases["exposed"]) / communication

    def backward_alone(communication, phases):
        return communication / phases["backward"]

    def without_optimizer(communication, phases):
        return communication / (phases["forward"] + phases["backward"])

    def constant(communication, phases):
        return 0.73

    def in_percent(communication, phases):
        return 100 * shares(communication, phases)[0]

    def nothing(communication, phases):
        return None


class Overlap:
    def none(communication, phases):
        return 0.0

    def all_of_it(communication, phases):
        return 1.0

    def exposed_share(communication, phases):
        return phases["exposed"] / communication

    def in_seconds(communication, phases):
        return communication - phases["exposed"]

    def of_computing(communication, phases):
        return (communication - phases["exposed"]) / (sum(phases.values()) - phases["exposed"])

    def of_the_step(communication, phases):
        return (communication - phases["exposed"]) / sum(phases.values())

    def nothing(communication, phases):
        return None


WRONG = [
    *(((answer, right.communication_shares), words) for answer, words in [
        (Wrap.default_cap, "wrong_bucket_cap"),
        (Wrap.the_students_own, "wrong_type"),
        (Wrap.unwrapped, "wrong_type"),
        (Wrap.bytes_as_mib, "wrong_bucket_cap"),
        (Wrap.in_mb, "wrong_bucket_cap"),
        (Wrap.whole_mib, "wrong_bucket_cap"),
        (Wrap.a_child, "other_model")]),
    *(((right.torch_ddp, with_ratio(answer)), words) for answer, words in [
        (Ratio.constant, "wrong_number"),
        (Ratio.exposed_alone, "exposed_alone"),
        (Ratio.of_the_step, "exposed_is_no_computing"),
        (Ratio.overlap_subtracted, "overlap_subtracted"),
        (Ratio.inverted, "inverted"),
        (Ratio.backward_alone, "phase_missing"),
        (Ratio.without_optimizer, "phase_missing"),
        (Ratio.in_percent, "wrong_number"),
        (Ratio.nothing, "not_a_number")]),
    *(((right.torch_ddp, with_overlap(answer)), words) for answer, words in [
        (Overlap.none, "wrong_number"),
        (Overlap.all_of_it, "wrong_number"),
        (Overlap.exposed_share, "exposed_share"),
        (Overlap.in_seconds, "seconds_not_share"),
        (Overlap.of_computing, "share_of_computing"),
        (Overlap.of_the_step, "share_of_step"),
        (Overlap.nothing, "not_a_number")]),
    ((right.torch_ddp, lambda communication, phases: shares(communication, phases)[0]),
     "wrong_count")]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_measurement(*answers), expected)


# right, and written in another way


class Right:
    def with_views(model, cap_bytes):
        return DistributedDataParallel(model, gradient_as_bucket_view=True,
                                       bucket_cap_mb=cap_bytes / 1024 / 1024)

    def by_phase(communication, phases):
        computing = sum(phases[name] for name in ("forward", "backward", "optimizer"))
        return [communication / computing, 1 - phases["exposed"] / communication]


@pytest.mark.parametrize("answers", [
    [right.torch_ddp, right.communication_shares], [Right.with_views, Right.by_phase]])
def test_a_right_answer_passes(answers):
    verdict = lab.check_measurement(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_measurement, "2.10", functions=2)
