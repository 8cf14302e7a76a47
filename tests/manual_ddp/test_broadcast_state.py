"""What the check of exercise 2.2 must reject, and what it must accept, in its first half."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ddp_answers import (
    ALONE,
    Answers,
    N,
    accepted,
    rejected,
    right,
    trainable,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
# 2.2 broadcast_state


class Broadcast:
    def sleeps(model):
        """For longer than a rank is delayed, instead of waiting."""
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0, async_op=True)
        time.sleep(0.5)

    def nothing(model):
        pass

    def buffers_forgotten(model):
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)

    def frozen_forgotten(model):
        for tensor in [*trainable(model), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def averaged(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.all_reduce(tensor.detach())
            tensor.data /= N()

    def from_every_rank(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=dist.get_rank())

    def from_the_last_rank(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=N() - 1)

    def into_a_copy(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach().clone(), src=0)

    def new_parameters(model):
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    copy = parameter.detach().clone()
                    dist.broadcast(copy, src=0)
                    setattr(module, name, torch.nn.Parameter(copy, parameter.requires_grad))
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    def only_on_rank_0(model):
        if dist.get_rank() == 0:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)

    def by_state_dict(model):
        box = [model.state_dict()]
        dist.broadcast_object_list(box, src=0)
        model.load_state_dict(box[0])

    def by_state_dict_gathered(model):
        for tensor in model.state_dict().values():
            everyone = [torch.empty_like(tensor) for _ in range(N())]
            dist.all_gather(everyone, tensor)
            tensor.copy_(everyone[0])

    def not_awaited(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0, async_op=True)

    def of_the_outermost_module(model):
        for tensor in [*model.parameters(recurse=False), *model.buffers(recurse=False)]:
            dist.broadcast(tensor.detach(), src=0)

    def leaves_requires_grad_off(model):
        for parameter in model.parameters():
            dist.broadcast(parameter.requires_grad_(False), src=0)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)

    def in_half_precision(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            half = tensor.detach().to(torch.bfloat16)
            dist.broadcast(half, src=0)
            tensor.data.copy_(half)

    def one_seed_instead(model):
        model.load_state_dict(type(model)(seed=0).state_dict())
        for mine, its in zip(model.buffers(), type(model)(seed=0).buffers(), strict=True):
            mine.copy_(its)
        dist.barrier()

    def without_a_source(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach())

    def another_librarys_argument(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), root=0)

    def in_place_with_autograd(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            copy = tensor.detach().clone()
            dist.broadcast(copy, src=0)
            tensor.copy_(copy)

    def untied(model):
        state = [{**dict(model.named_parameters()), **dict(model.named_buffers())}]
        dist.broadcast_object_list(state, src=0)
        model.load_state_dict(state[0], strict=False, assign=True)
        for name, buffer in model.named_buffers():
            buffer.copy_(state[0][name])


WRONG = [
    (Broadcast.nothing, "nothing_sent"),
    (Broadcast.buffers_forgotten, "not_broadcast 'shift'"),
    (Broadcast.frozen_forgotten, "not_broadcast"),
    (Broadcast.averaged, "rank_0_changed"),
    (Broadcast.from_every_rank, "collectives_differ", ALONE),
    (Broadcast.from_the_last_rank, "rank_0_changed"),
    (Broadcast.into_a_copy, "not_broadcast"),
    (Broadcast.new_parameters, "parameters_replaced"),
    (Broadcast.only_on_rank_0,
     "collectives_differ same collectives", ALONE),
    (Broadcast.by_state_dict, "not_broadcast 'outlet.offset'"),
    (Broadcast.by_state_dict_gathered, "not_broadcast 'outlet.offset'"),
    (Broadcast.not_awaited, "never_waited broadcast"),
    (Broadcast.sleeps, "never_waited"),
    (Broadcast.of_the_outermost_module, "not_broadcast weight'"),
    (Broadcast.leaves_requires_grad_off, "requires_grad_changed"),
    (Broadcast.in_half_precision, "rank_0_changed"),
    (Broadcast.one_seed_instead, "too_little_sent"),
    (Broadcast.without_a_source, "raised_TypeError|raised_ValueError"),
    (Broadcast.another_librarys_argument, "raised_TypeError|raised_ValueError"),
    (Broadcast.in_place_with_autograd, "raised_RuntimeError tensor.detach"),
    (Broadcast.untied, "parameters_replaced")]
WRONG_ANSWERS = Answers([(lab.check_average_gradients, (answer, right.average_gradients), *more)
                         for answer, *more in WRONG])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


# right, and written in another way


class Right:
    def broadcast_objects(model):
        box = [[*model.parameters(), *model.buffers()]]
        dist.broadcast_object_list(box, src=0)
        with torch.no_grad():
            for mine, its in zip([*model.parameters(), *model.buffers()], box[0], strict=True):
                mine.copy_(its)

    def broadcast_data(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)

    def broadcast_asynchronously(model):
        works = [dist.broadcast(tensor.detach(), src=0, async_op=True)
                 for tensor in [*model.parameters(), *model.buffers()]]
        for work in works:
            work.get_future().wait()

    def broadcast_point_to_point(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            if dist.get_rank() == 0:
                for rank in range(1, N()):
                    dist.send(tensor.detach(), rank)
            else:
                dist.recv(tensor.detach(), 0)

    def broadcast_flat(model):
        tensors = [*model.parameters(), *model.buffers()]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in alike])
            dist.broadcast(flat, src=0)
            for tensor, piece in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def broadcast_functional(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.copy_(functional.broadcast(tensor.detach(), 0, dist.group.WORLD))


RIGHT = [
        right.broadcast_state, Right.broadcast_objects, Right.broadcast_data,
        Right.broadcast_asynchronously, Right.broadcast_point_to_point, Right.broadcast_flat,
        Right.broadcast_functional]
RIGHT_ANSWERS = Answers([(lab.check_average_gradients, (answer, right.average_gradients))
                         for answer in RIGHT], ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
