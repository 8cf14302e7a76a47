"""What the check of exercise 6.5 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected

import labs.scaling as lab
from labs.predictions.communication.host_links import LinkTime, Topology, flat_all_reduce

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")
# 6.5 link_seconds


def link_seconds(nbytes, seconds=lambda nbytes, alpha, beta: alpha + nbytes / beta):
    """An answer that computes the bytes from (size, hosts, ranks)."""
    def answer(size, hosts, ranks, alpha, beta):
        found = nbytes(size, hosts, ranks)
        return found, seconds(found, alpha, beta)

    return answer


def right_bytes(size, hosts, ranks):
    return right.link_seconds(size, hosts, ranks, 0, 1)[0]


def with_topology(size, hosts, ranks, alpha, beta):
    nbytes = flat_all_reduce(size, Topology(hosts, ranks))
    return [torch.tensor(float(nbytes), dtype=torch.float64), LinkTime(alpha, beta).seconds(nbytes)]


WRONG = [
    (lambda size, hosts, ranks, alpha, beta: None, "wrong_count nothing"),
    (lambda size, hosts, ranks, alpha, beta: right_bytes(size, hosts, ranks), "wrong_count"),
    (lambda size, hosts: (0, 0), "wrong_signature"),
    (link_seconds(lambda size, hosts, ranks: 1.5 * size), "wrong_number"),
    (link_seconds(lambda size, hosts, ranks: size), "tensor_itself"),
    (link_seconds(lambda size, hosts, ranks: 2 * size), "own_piece_too"),
    (link_seconds(lambda size, hosts, ranks: 2 * (hosts - 1) / hosts * size),
     "ring_one_rank_on_host"),
    (link_seconds(lambda size, hosts, ranks: 2 * (ranks - 1) / ranks * size),
     "ring_inside_one_host"),
    (link_seconds(lambda *case: right_bytes(*case) / 2), "reduce_scatter_alone"),
    (link_seconds(lambda *case: 2 * right_bytes(*case)), "counts_both_directions_together"),
    (link_seconds(lambda *case: case[2] * right_bytes(*case)), "all_ranks_host_send_together"),
    (link_seconds(lambda *case: case[1] * case[2] * right_bytes(*case)), "all_ranks_send_together"),
    (link_seconds(lambda size, hosts, ranks: 2 * (hosts * ranks - 1) / (hosts * ranks) * size),
     "on_one_host_no_byte"),
    (link_seconds(lambda size, hosts, ranks: int(right_bytes(size, hosts, ranks)) // 1000 * 1000),
     "wrong_number"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: nbytes / beta), "missing"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: alpha + 8 * nbytes / beta),
     "takes_for_bits_per_second"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: alpha + nbytes * beta),
     "multiplies"),
    (link_seconds(right_bytes, lambda nbytes, alpha, beta: max(alpha, nbytes / beta)),
     "missing"),
    (lambda size, hosts, ranks, alpha, beta: (
        right_bytes(size, hosts, ranks),
        2 * (hosts * ranks - 1) * alpha + right_bytes(size, hosts, ranks) / beta),
     "wrong_steps"),
    (lambda size, hosts, ranks, alpha, beta: (right_bytes(size, hosts, ranks),
                                              alpha + size / beta), "size_not_bytes"),
    (link_seconds(lambda *case: right_bytes(*case) // 1 - 1), "wrong_number"),
    (lambda size, hosts, ranks, alpha, beta: (
        right.link_seconds(size, hosts, ranks, alpha, beta)[::-1]), "swapped"),
    (lambda size, hosts, ranks, alpha, beta: (alpha, right_bytes(size, hosts, ranks)),
     "wrong_number")]
RIGHT = [
    right.link_seconds, with_topology, link_seconds(lambda *case: int(right_bytes(*case)))]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_link_seconds(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_link_seconds(answer)
    assert verdict.passed, verdict
