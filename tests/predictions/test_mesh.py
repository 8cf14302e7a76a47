"""Places and groups of ranks in a mesh, held to torch's own numbering."""

import pytest
import torch

from labs.predictions.communication.mesh import Mesh

SIZES = [(32, 12, 8), (2, 2, 2), (5,), (1, 7, 1), (3, 1, 4, 2)]


@pytest.mark.parametrize("sizes", SIZES)
def test_places_and_groups_are_those_of_torchs_meshes(sizes):
    """init_device_mesh lays ranks out as torch.arange does: the last dimension is the fastest."""
    names = tuple("abcd"[:len(sizes)])
    mesh = Mesh(names, sizes)
    ranks = torch.arange(mesh.ranks).view(*sizes)
    for rank in range(0, mesh.ranks, max(1, mesh.ranks // 50)):
        places = mesh.coordinates(rank)
        assert ranks[places].item() == rank == mesh.rank(places)
        for dimension, name in enumerate(names):
            group = ranks[(*places[:dimension], slice(None), *places[dimension + 1:])].tolist()
            assert mesh.group(rank, name) == group


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_groups_of_a_dimension_divide_the_ranks(sizes):
    mesh = Mesh(tuple("abcd"[:len(sizes)]), sizes)
    for name, size in zip(mesh.names, sizes, strict=True):
        groups = mesh.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
        assert {len(group) for group in groups} == {size}


def test_only_the_fastest_dimension_stays_on_a_node():
    mesh = Mesh(("data", "pipeline", "tensor"), (32, 12, 8))
    assert [mesh.crosses_nodes(name) for name in mesh.names] == [True, True, False]
    assert mesh.nodes(mesh.group(9, "tensor")) == [1]
    assert len(mesh.nodes(mesh.group(0, "pipeline"))) == 12
    assert Mesh(("data", "tensor"), (4, 2)).crosses_nodes("data") is False  # all on one node


@pytest.mark.parametrize(("make", "says"), [
    (lambda: Mesh(("a",), (2, 2)), "1 names for 2 sizes"),
    (lambda: Mesh(("a",), (0,)), "a=0: at least 1"),
    (lambda: Mesh(("a",), (2,)).coordinates(2), "no rank 2: the mesh has ranks 0 to 1")])
def test_a_mesh_that_cannot_be(make, says):
    with pytest.raises(ValueError, match=says):
        make()
