"""Bytes on a host's link, and α and β."""

import random

import pytest

from labs.predictions.communication import host_links
from labs.predictions.communication.host_links import LinkTime, Topology

TOPOLOGIES = [Topology(hosts, ranks) for hosts in (1, 2, 3, 4) for ranks in (1, 2, 4, 8)]


def sent_over_links(topology, size):
    """What leaves each host when a ring over all ranks reduces: every rank sends to the next one,
    in 2(n-1) turns, a piece of S/n."""
    n = topology.world_size
    links = [0.0] * topology.hosts
    for _ in range(2 * (n - 1)):
        for rank in range(n):
            here, there = rank // topology.ranks, (rank + 1) % n // topology.ranks
            links[here] += size / n * (here != there)
    return links


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_flat_ring_is_what_its_turns_add_up_to(topology):
    assert sent_over_links(topology, 1e6) == pytest.approx(
        [host_links.flat_all_reduce(1e6, topology)] * topology.hosts)


def test_two_hosts_of_two_ranks():
    pair, size = Topology(2, 2), 8e6
    assert host_links.flat_all_reduce(size, pair) == 1.5 * size
    assert host_links.hierarchical_all_reduce(size, pair) == size
    assert host_links.flat_fsdp_step(size, pair) == 2.25 * size
    assert host_links.flat_fsdp_step(size, pair, reshard=False) == 1.5 * size
    assert host_links.hybrid_fsdp_step(size, pair) == size


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_hierarchy_never_puts_more_on_the_link(topology):
    hierarchical = host_links.hierarchical_all_reduce(1.0, topology)
    flat = host_links.flat_all_reduce(1.0, topology)
    if topology.hosts == 1:
        assert hierarchical == flat == 0
    elif topology.ranks == 1:
        assert hierarchical == flat
    else:
        assert hierarchical < flat


def test_no_host_and_no_rank():
    with pytest.raises(ValueError, match="hosts=0"):
        Topology(0, 2)
    with pytest.raises(ValueError, match="ranks=0"):
        Topology(2, 0)


def test_a_fit_finds_what_made_the_seconds():
    made, sizes, rng = LinkTime(0.004, 25e6), [1e4, 1e5, 1e6, 4e6, 16e6], random.Random(0)
    seconds = [made.seconds(size) for size in sizes]
    exact = host_links.fit(sizes, seconds)
    assert (exact.alpha, exact.beta) == pytest.approx((made.alpha, made.beta))
    noisy = host_links.fit(sizes, [s * rng.uniform(0.95, 1.05) for s in seconds])
    assert noisy.seconds(8e6) == pytest.approx(made.seconds(8e6), rel=0.1)
    assert noisy.seconds(2e4) == pytest.approx(made.seconds(2e4), rel=0.1)
    assert str(exact) == "α = 4.00 ms, β = 25.0 MB/s"
    assert str(LinkTime(4e-6, 25e6)) == "α is too small to see on this link, β = 25.0 MB/s"


def test_alpha_is_never_negative():
    fitted = host_links.fit([1e6, 2e6, 4e6], [0.03, 0.08, 0.17])
    assert fitted.alpha == 0 and fitted.beta > 0


@pytest.mark.parametrize(("sizes", "seconds", "says"), [
    ([1e6, 1e6], [0.1, 0.2], "two different sizes"), ([1e6], [0.1], "two different sizes"),
    ([1e6, 2e6], [0.1], "as many seconds as sizes"), ([0, 1e6], [0.1, 0.2], "greater than 0"),
    ([1e6, 2e6], [0.0, 0.2], "greater than 0"), ([1e6, 8e6], [0.5, 0.1], "do not grow")])
def test_what_cannot_be_fitted_is_said(sizes, seconds, says):
    with pytest.raises(ValueError, match=says):
        host_links.fit(sizes, seconds)
