"""Bytes that are copied between a device and the host; the meta device takes a GPU's place."""

import torch

from labs.meters.host_copies import HostCopies


def test_copies_to_the_device_are_counted_and_others_are_not():
    source, there = torch.zeros(10), torch.zeros(6, device="meta")
    with HostCopies("meta") as copies:
        source.to("meta")
        there.copy_(torch.zeros(6))
        source.double()
        there.to(torch.float64)
    assert (copies.to_device, copies.to_host, copies.bytes) == (64, 0, 64)


def test_both_directions_are_counted_apart():
    copies = HostCopies()
    for source, target in (("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")):
        copies._count(source, target, 8)
    assert (copies.to_device, copies.to_host, copies.bytes) == (8, 8, 16)
