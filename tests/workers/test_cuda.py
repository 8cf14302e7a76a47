"""What labs.workers.cuda asks a GPU, where there is one; on the pretend node in CI."""

import pytest
import torch
from torch.nn.functional import dropout

import labs
from labs.workers import cuda, devices


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


def _dropout_again():
    """(number of generators, whether dropout draws the same again after their states are put back,
    whether without)."""
    ones, states = torch.ones(50, device=devices.device()), devices.random_states()
    first, second = dropout(ones), dropout(ones)
    devices.set_random_states(states)
    again = dropout(ones)
    return len(states), torch.equal(first, again), torch.equal(first, second)


def test_random_states_are_put_back_on_a_cpu(warm_launcher):
    assert list(labs.launch(_dropout_again, ranks=2, device="cpu", quiet=True)) == 2 * [
        (1, True, False)]


@pytest.mark.gpu
def test_random_states_are_put_back_on_cuda(warm_launcher):
    assert list(labs.launch(_dropout_again, ranks=2, quiet=True)) == 2 * [(2, True, False)]
