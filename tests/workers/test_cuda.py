"""What labs.workers.cuda asks a GPU, where there is one; on the pretend node in CI."""

import pytest

import labs
from labs.workers import cuda


@pytest.mark.gpu
def test_what_a_gpu_says_of_itself():
    def work():
        peers = cuda.can_access_peer(0, 1) if cuda.count() > 1 else None
        return cuda.name(), cuda.capability(), cuda.total_memory(), peers

    [(name, capability, nbytes, peers)] = labs.launch(work, ranks=1, quiet=True)
    assert name and capability >= (5, 0) and nbytes > 1e9
    assert peers in (True, False) or cuda.count() == 1


@pytest.mark.gpu
def test_nccl_has_a_version():
    assert cuda.nccl_version() > (2, 0)
