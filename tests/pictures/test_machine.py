"""The machine's picture, on machines that we do not have."""

import pytest
from drawn import on_the_sheet

import labs
from labs.pictures import machine
from labs.pictures.machine import Facts
from labs.workers.devices import Plan

GB = 10**9
EIGHT = "NVIDIA A100-SXM4-80GB, 81920\n" * 8


def topology(gpus, link):
    rows = [f"GPU{i}\t" + "\t".join("X" if i == j else link(i, j) for j in range(gpus))
            + "\tSYS\t0-47\t0" for i in range(gpus)]
    return "\n".join(["\t" + "\t".join(f"GPU{i}" for i in range(gpus)) + "\tNIC0", *rows,
                      "NIC0\tSYS\tSYS", "Legend:", "  NV#  = Connection traversing NVLinks"])


def test_gpus_are_read_from_nvidia_smi():
    assert machine.parse_gpus(EIGHT) == [("A100-SXM4-80GB", 80 * 2**30)] * 8
    assert machine.parse_gpus("") == []


def test_links_are_counted_once_per_pair():
    assert machine.parse_links(topology(8, lambda i, j: "NV12"), 8) == {"NV12": 28}
    mixed = machine.parse_links(topology(4, lambda i, j: "NV4" if i // 2 == j // 2 else "SYS"), 4)
    assert mixed == {"NV4": 2, "SYS": 4}


@pytest.mark.parametrize("links, words", [
    ({"NV12": 28}, "12 NVLinks between every pair of GPUs"),
    ({"NV4": 2, "SYS": 4}, "4 NVLinks: 2 pairs, PCIe and the CPUs' link: 4 pairs")])
def test_links_in_words(links, words):
    assert machine.link_words(links) == words


@pytest.mark.parametrize("facts", [
    Facts(2, 25 * GB, [], {}, Plan(2, "gloo", ("cpu",) * 2, 1, "no GPU here")),
    Facts(128, 512 * GB, [], {}, Plan(4, "gloo", ("cpu",) * 4, 1, "no GPU here " * 20)),
    Facts(16, 128 * GB, [("H200", 140 * 2**30)], {},
          Plan(2, "gloo", ("cuda:0",) * 2, 8, "2 ranks share 1 GPU")),
    Facts(96, 2000 * GB, machine.parse_gpus(EIGHT), {"NV12": 28},
          Plan(8, "nccl", tuple(f"cuda:{i}" for i in range(8)), 12, "one GPU per rank"))])
def test_every_machine_fits_its_picture(facts):
    picture = machine.draw(facts)
    on_the_sheet(picture)
    assert picture.ranks == facts.plan.ranks
    assert str(facts.cores) in picture.text
    assert f"A launch starts {facts.plan.ranks} ranks here unless you ask" in picture.text


def test_this_machine():
    assert labs.machine().data.cores >= 1
