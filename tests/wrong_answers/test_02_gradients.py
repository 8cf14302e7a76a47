"""What the checks of exercises 2.1 to 2.4 must reject, with the words that must say why; and what
they must accept. `pytest -s` prints the verdict of each wrong answer."""

import copy
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ddp_answers import (
    ALONE,
    Answers,
    N,
    accepted,
    broadcast_state,
    flattened,
    give,
    rejected,
    right,
    trainable,
    wrapping,
    zeros,
    zeros_for_none,
)

import labs.manual_ddp as lab
from labs.workers import collectives

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
WRONG = {}


# 2.1 combine


class Combine:
    def plain_mean(gradients, sizes):
        return sum(gradients) / len(gradients)

    def plain_sum(gradients, sizes):
        return sum(gradients)

    def weights_not_normalised(gradients, sizes):
        return sum(g * n for g, n in zip(gradients, sizes, strict=True))

    def weights_by_the_largest(gradients, sizes):
        return sum(g * n / max(sizes) for g, n in zip(gradients, sizes, strict=True))

    def only_the_largest_shard(gradients, sizes):
        return gradients[sizes.index(max(sizes))]

    def a_list(gradients, sizes):
        return [g * n / sum(sizes) for g, n in zip(gradients, sizes, strict=True)]

    def nothing(gradients, sizes):
        return None

    def writes_into_the_first(gradients, sizes):
        result = gradients[0]
        result *= sizes[0] / sum(sizes)
        for gradient, size in zip(gradients[1:], sizes[1:], strict=True):
            result += gradient * (size / sum(sizes))
        return result

    def empties_the_sizes(gradients, sizes):
        total = sum(sizes)
        return sum(gradient * sizes.pop(0) / total for gradient in gradients)

    def in_float64(gradients, sizes):
        return sum(g.double() * (n / sum(sizes)) for g, n in zip(gradients, sizes, strict=True))

    def as_numpy(gradients, sizes):
        return np.average([g.numpy() for g in gradients], axis=0, weights=sizes)

    def divides_whole_numbers(gradients, sizes):
        return sum(g * (n // sum(sizes)) for g, n in zip(gradients, sizes, strict=True))

    def rounds_the_weights(gradients, sizes):
        return sum(g * round(n / sum(sizes), 2) for g, n in zip(gradients, sizes, strict=True))

    def of_twelve_examples(gradients, sizes):
        return sum(g * (n / 12) for g, n in zip(gradients, sizes, strict=True))

    def in_reverse(gradients, sizes):
        return Right.combine(gradients[::-1], sizes)

    def the_larger_the_less(gradients, sizes):
        return Right.combine(gradients, [1 / size for size in sizes])

    def mean_of_weighted(gradients, sizes):
        return right.combine(gradients, sizes) / len(gradients)

    def by_squares(gradients, sizes):
        return Right.combine(gradients, [size ** 2 for size in sizes])


WRONG[lab.check_combine] = [
    (Combine.plain_mean, "unweighted_mean"),
    (Combine.plain_sum, "sum_not_mean gradients"),
    (Combine.weights_not_normalised, "wrong_scale 12x"),
    (Combine.weights_by_the_largest, "wrong_scale 1.5x"),
    (Combine.only_the_largest_shard, "wrong_gradient"),
    (Combine.a_list, "wrong_type list"),
    (Combine.nothing, "wrong_type nothing"),
    (Combine.writes_into_the_first, "changes_input gradient"),
    (Combine.empties_the_sizes, "changes_input changed"),
    (Combine.in_float64, "wrong_dtype"),
    (Combine.as_numpy, "wrong_type ndarray"),
    (Combine.divides_whole_numbers, "zero_gradient"),
    (Combine.rounds_the_weights, "wrong_gradient"),
    (Combine.of_twelve_examples, "wrong_scale 1.083x"),
    (Combine.in_reverse, "wrong_gradient"),
    (Combine.the_larger_the_less, "wrong_gradient"),
    (Combine.mean_of_weighted, "wrong_scale 0.3333x"),
    (Combine.by_squares, "wrong_gradient")]


# 2.2 broadcast_state


class Broadcast:
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


WRONG[lab.check_broadcast_state] = [
    (Broadcast.nothing, "nothing_sent"),
    (Broadcast.buffers_forgotten, "not_broadcast 'shift'"),
    (Broadcast.frozen_forgotten, "not_broadcast"),
    (Broadcast.averaged, "rank_0_changed"),
    (Broadcast.from_every_rank, "collectives_differ", ALONE),
    (Broadcast.from_the_last_rank, "rank_0_changed"),
    (Broadcast.into_a_copy, "not_broadcast"),
    (Broadcast.new_parameters, "parameters_replaced"),
    (Broadcast.only_on_rank_0,
     "collectives_differ function", ALONE),
    (Broadcast.by_state_dict, "not_broadcast 'outlet.offset'"),
    (Broadcast.by_state_dict_gathered, "not_broadcast 'outlet.offset'"),
    (Broadcast.not_awaited, "never_waited broadcast"),
    (Broadcast.of_the_outermost_module, "not_broadcast weight'"),
    (Broadcast.leaves_requires_grad_off, "requires_grad_changed"),
    (Broadcast.in_half_precision, "rank_0_changed"),
    (Broadcast.one_seed_instead, "too_little_sent"),
    (Broadcast.without_a_source, "raised_TypeError|raised_ValueError"),
    (Broadcast.another_librarys_argument, "raised_TypeError|raised_ValueError"),
    (Broadcast.in_place_with_autograd, "raised_RuntimeError tensor.detach"),
    (Broadcast.untied, "parameters_replaced")]


# 2.3 average_gradients


class Average:
    def nothing(model):
        pass

    def a_sum(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad)

    def only_divided(model):
        for parameter in zeros_for_none(model):
            parameter.grad /= N()

    def divided_by_two(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2

    def divided_twice(model):
        for parameter in zeros_for_none(model):
            parameter.grad /= N()
            dist.all_reduce(parameter.grad)
            parameter.grad /= N()

    def parameters_averaged(model):
        for parameter in trainable(model):
            with torch.no_grad():
                parameter += 1e-2 * dist.get_rank()
                dist.all_reduce(parameter)
                parameter /= N()

    def none_skipped(model):
        for parameter in trainable(model):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= N()

    def none_communicated(model):
        for parameter in trainable(model):
            dist.all_reduce(parameter.grad)
            parameter.grad /= N()

    def reduced_to_rank_0(model):
        for parameter in zeros_for_none(model):
            dist.reduce(parameter.grad, dst=0)
            if dist.get_rank() == 0:
                parameter.grad /= N()

    def rank_0s_gradients(model):
        for parameter in zeros_for_none(model):
            dist.broadcast(parameter.grad, src=0)

    def first_parameter_only(model):
        parameter = zeros_for_none(model)[0]
        dist.all_reduce(parameter.grad)
        parameter.grad /= N()

    def everything_gathered(model):
        for parameter in zeros_for_none(model):
            everyone = [torch.empty_like(parameter.grad) for _ in range(N())]
            dist.all_gather(everyone, parameter.grad)
            parameter.grad = sum(everyone) / N()

    def frozen_too(model):
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= N()

    def torchs_ddp(model):
        torch.nn.parallel.DistributedDataParallel(model)

    def over_the_users(model):
        for parameter in trainable(model):
            used = torch.tensor(float(parameter.grad is not None))
            zeros([parameter])
            dist.all_reduce(parameter.grad)
            dist.all_reduce(used)
            parameter.grad /= used.clamp(min=1)

    def not_awaited(model):
        for parameter in zeros_for_none(model):
            parameter.grad /= N()
            dist.all_reduce(parameter.grad, async_op=True)

    def wait_without_a_call(model):
        for parameter in zeros_for_none(model):
            work = dist.all_reduce(parameter.grad, async_op=True)
            work.wait  # noqa: B018
            parameter.grad /= N()

    def what_rank_0_used(model):
        for parameter in trainable(model):
            used = torch.tensor(float(parameter.grad is not None))
            dist.broadcast(used, src=0)
            if used:
                dist.all_reduce(zeros([parameter])[0].grad)
                parameter.grad /= N()

    def tied_twice(model):
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    dist.all_reduce(zeros([parameter])[0].grad)
                    parameter.grad /= N()

    def objects_gathered(model):
        for parameter in zeros_for_none(model):
            everyone = [None] * N()
            dist.all_gather_object(everyone, parameter.grad)
            parameter.grad = sum(everyone) / N()

    def averages_and_divides(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            parameter.grad /= N()

    def the_largest(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)

    def takes_the_result(model):
        for parameter in zeros_for_none(model):
            parameter.grad = dist.all_reduce(parameter.grad) / N()

    def into_a_copy(model):
        for parameter in zeros_for_none(model):
            mean = parameter.grad / N()
            dist.all_reduce(mean)

    def matrices_only(model):
        for parameter in zeros_for_none(model):
            if parameter.dim() == 2:
                dist.all_reduce(parameter.grad)
                parameter.grad /= N()

    def from_rank_1(model):
        for parameter in zeros_for_none(model):
            dist.broadcast(parameter.grad, src=1)


WRONG[lab.check_average_gradients] = [
    (Average.nothing, "gradient_of_one_rank"),
    (Average.a_sum, "sum_not_mean"),
    (Average.only_divided, "not_summed"),
    (Average.divided_by_two, "wrong_divisor"),
    (Average.divided_twice, "mean_twice"),
    (Average.parameters_averaged, "differs_from_reference"),
    (Average.none_skipped, "collectives_differ takes", ALONE),
    (Average.none_communicated, "collectives_differ travel", ALONE),
    (Average.reduced_to_rank_0, "wrong_gradient"),
    (Average.rank_0s_gradients, "gradient_of_one_rank"),
    (Average.first_parameter_only, "gradient_of_one_rank 'first.weight'"),
    (Average.everything_gathered, "too_much_sent 1.5x"),
    (Average.frozen_too, "frozen_parameter"),
    (Average.torchs_ddp, "ready_made"),
    (Average.over_the_users, "too_much_sent"),
    (Average.not_awaited, "never_waited all-reduce"),
    (Average.wait_without_a_call, "never_waited all-reduce"),
    (Average.what_rank_0_used, "too_much_sent"),
    (Average.tied_twice, "too_much_sent 1.8x"),
    (Average.objects_gathered, "too_much_sent"),
    (Average.averages_and_divides, "mean_twice"),
    (Average.the_largest, "wrong_gradient"),
    (Average.takes_the_result, "raised_TypeError collective"),
    (Average.into_a_copy, "gradient_of_one_rank"),
    (Average.matrices_only, "gradient_of_one_rank"),
    (Average.from_rank_1, "gradient_of_another_rank")]


# 2.4 ManualDDP


class Base(lab.Wrapper):
    """The right answer in pieces that a wrong one replaces."""

    def __init__(self, module):
        super().__init__(module)
        self.begin(module)
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(self.average)

    def begin(self, module):
        broadcast_state(module)

    def average(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= N()


class DoesNothing(lab.Wrapper):
    pass


class TorchInside(lab.Wrapper):
    def __init__(self, module):
        super().__init__(torch.nn.parallel.DistributedDataParallel(module))


class NoStart(Base):
    def begin(self, module):
        pass


class Sums(Base):
    def average(self, parameter):
        dist.all_reduce(parameter.grad)


class Once(Base):
    """Synchronizes in the first step only."""

    def average(self, parameter):
        if parameter not in self.__dict__.setdefault("done", set()):
            self.done.add(parameter)
            super().average(parameter)


class TensorHook(lab.Wrapper):
    """A tensor hook that computes the mean, and returns None: the gradient stays as it was."""

    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)
        for parameter in trainable(module):
            parameter.register_hook(self.average)

    def average(self, gradient):
        mean = gradient.clone()
        dist.all_reduce(mean)
        gradient = mean / N()


class HookReturns(Base):
    """The hook returns the mean; torch refuses that."""

    def average(self, parameter):
        mean = parameter.grad.clone()
        dist.all_reduce(mean)
        return mean / N()


class AveragesParameters(Base):
    def average(self, parameter):
        with torch.no_grad():
            dist.all_reduce(parameter)
            parameter /= N()


class FrozenHook(lab.Wrapper):
    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: None)


class TwoHooks(Base):
    """As a second wrapper around the first: every gradient is averaged, and travels, twice."""

    def __init__(self, module):
        super().__init__(module)
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(self.average)


class InForward(lab.Wrapper):
    """Averages what the previous backward left, one step late."""

    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)

    def forward(self, *inputs, **named):
        for parameter in trainable(self.module):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= N()
        return super().forward(*inputs, **named)


class ScalesTheLoss(Base):
    """The gradients are right; the loss that the loop prints is not."""

    def average(self, parameter):
        dist.all_reduce(parameter.grad)

    def forward(self, *inputs, **named):
        out = super().forward(*inputs, **named)
        out.loss = out.loss / N()
        return out


class AveragesTheLossToo(Base):
    def forward(self, *inputs, **named):
        out = super().forward(*inputs, **named)
        dist.all_reduce(out.loss.data)
        out.loss.data /= N()
        return out


class NotAwaited(Base):
    def average(self, parameter):
        parameter.grad /= N()
        dist.all_reduce(parameter.grad, async_op=True)


class Hidden(torch.nn.Module):
    """A list hides the module from parameters()."""

    def __init__(self, module):
        super().__init__()
        self.inner = [module]
        broadcast_state(module)
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(lambda p: Base.average(self, p))

    def forward(self, *inputs, **named):
        return self.inner[0](*inputs, **named)


class Copied(Base):
    def __init__(self, module):
        super().__init__(copy.deepcopy(module))


class NoSuper(lab.Wrapper):
    def __init__(self, module):
        self.module = module


class NoSuperEither(lab.Wrapper):
    def __init__(self, module):
        broadcast_state(module)


class HookInForward(Base):
    """A further hook in each forward: from the second step on each gradient travels twice."""

    def __init__(self, module):
        lab.Wrapper.__init__(self, module)
        broadcast_state(module)

    def forward(self, *inputs, **named):
        for parameter in trainable(self.module):
            parameter.register_post_accumulate_grad_hook(self.average)
        return super().forward(*inputs, **named)


class Flags(Base):
    def average(self, parameter):
        dist.all_reduce(torch.ones(1))
        super().average(parameter)


class BuffersEachForward(Base):
    def forward(self, *inputs, **named):
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)
        return super().forward(*inputs, **named)


class HooksOfTheLargest(lab.Wrapper):
    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)
        for parameter in trainable(module):
            if parameter.dim() == 2:
                parameter.register_post_accumulate_grad_hook(lambda p: Base.average(self, p))


class HookWithoutArgument(Base):
    def average(self):
        pass


WRONG[lab.check_manual_ddp] = [
    (DoesNothing, "not_broadcast"),
    (TorchInside, "ready_made"),
    (NoStart, "not_broadcast"),
    (Sums, "sum_not_mean step"),
    (Once, "gradient_of_one_rank"),
    (TensorHook, "gradient_of_one_rank"),
    (HookReturns, "raised_RuntimeError should"),
    (AveragesParameters, "gradient_of_one_rank"),
    (FrozenHook, "raised_RuntimeError doesn't"),
    (TwoHooks, "too_much_sent"),
    (InForward, "gradient_of_one_rank"),
    (ScalesTheLoss, "wrong_loss"),
    (AveragesTheLossToo, "wrong_loss"),
    (NotAwaited, "never_waited all-reduce"),
    (Hidden, "parameters_hidden"),
    (Copied, "not_broadcast"),
    (NoSuper, "raised_AttributeError"),
    (NoSuperEither, "raised_AttributeError"),
    (HookInForward, "too_much_sent"),
    (Flags, "too_much_sent"),
    (BuffersEachForward, "too_much_sent"),
    (HooksOfTheLargest, "gradient_of_one_rank"),
    (HookWithoutArgument, "raised_TypeError called")]


WRONG_ANSWERS = Answers([(check, *row) for check, rows in WRONG.items() for row in rows])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


# right, and written in another way


class Right:
    def combine(gradients, sizes):
        weights = torch.tensor(sizes, dtype=torch.float32)
        return torch.tensordot(weights / weights.sum(), torch.stack(gradients), dims=1)

    def combine_by_a_loop(gradients, sizes):
        result = torch.zeros_like(gradients[0])
        for gradient, size in zip(gradients, sizes, strict=True):
            result += size * gradient
        return result / sum(sizes)

    def combine_with_numpys_weights(gradients, sizes):
        weights = np.array(sizes) / np.sum(sizes)
        return sum(g * weight for g, weight in zip(gradients, weights, strict=True))

    def combine_step_by_step(gradients, sizes):
        mean, seen = gradients[0], sizes[0]
        for gradient, size in zip(gradients[1:], sizes[1:], strict=True):
            seen += size
            mean = mean.lerp(gradient, size / seen)
        return mean

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

    def average_flat(model):
        parameters = zeros_for_none(model)
        flat = flattened(parameters) / N()
        dist.all_reduce(flat)
        give(parameters, flat)

    def average_asynchronously(model):
        works = [dist.all_reduce(p.grad, async_op=True) for p in zeros_for_none(model)]
        for work, parameter in zip(works, trainable(model), strict=True):
            work.wait()
            parameter.grad.div_(N())

    def average_by_op(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    def average_by_future(model):
        for parameter in zeros_for_none(model):
            future = dist.all_reduce(parameter.grad, async_op=True).get_future()
            parameter.grad = future.then(lambda done: done.value()[0] / N()).wait()

    def average_polling(model):
        works = [dist.all_reduce(p.grad, async_op=True) for p in zeros_for_none(model)]
        while not all(work.is_completed() for work in works):
            pass
        for parameter in trainable(model):
            parameter.grad /= N()

    def average_functional(model):
        for parameter in zeros_for_none(model):
            parameter.grad = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD) / N()

    def average_functional_avg(model):
        for parameter in zeros_for_none(model):
            mean = functional.all_reduce(parameter.grad, "avg", dist.group.WORLD)
            parameter.grad = functional.wait_tensor(mean)

    def average_coalesced(model):
        with dist._coalescing_manager():
            for parameter in zeros_for_none(model):
                dist.all_reduce(parameter.grad)
        for parameter in trainable(model):
            parameter.grad /= N()

    def average_in_halves(model):
        """A reduce-scatter and an all-gather are what an all-reduce is made of."""
        parameters = zeros_for_none(model)
        flat = flattened(parameters)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % N()))
        shard = torch.empty(len(padded) // N())
        collectives.reduce_scatter_single(shard, padded)
        collectives.all_gather_single(padded, shard / N())
        give(parameters, padded[:len(flat)])

    def average_at_rank_0(model):
        for parameter in zeros_for_none(model):
            dist.reduce(parameter.grad, dst=0)
            parameter.grad /= N()
            dist.broadcast(parameter.grad, src=0)


class PlainDDP(torch.nn.Module):
    """Not a lab.Wrapper; tensor hooks that return the mean."""

    def __init__(self, module):
        super().__init__()
        broadcast_state(module)
        self.inner = module
        for parameter in trainable(module):
            parameter.register_hook(self.mean)

    def mean(self, gradient):
        gradient = gradient / N()
        dist.all_reduce(gradient)
        return gradient

    def forward(self, *inputs, **named):
        return self.inner(*inputs, **named)


class FunctionalDDP(Base):
    def average(self, parameter):
        parameter.grad = functional.all_reduce(parameter.grad, "avg", dist.group.WORLD)


class AtTheEnd(Base):
    """Begins in the hooks, waits for all at the end of backward."""

    def average(self, parameter):
        if not self.__dict__.setdefault("works", []):
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        parameter.grad /= N()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self):
        torch.futures.wait_all([work.get_future() for work in self.works])
        self.works.clear()


RIGHT_ANSWERS = Answers([(check, answer) for check, answers in {
    lab.check_combine: [right.combine, Right.combine, Right.combine_by_a_loop,
                        Right.combine_with_numpys_weights, Right.combine_step_by_step],
    lab.check_broadcast_state: [
        right.broadcast_state, Right.broadcast_objects, Right.broadcast_data,
        Right.broadcast_asynchronously, Right.broadcast_point_to_point, Right.broadcast_flat,
        Right.broadcast_functional],
    lab.check_average_gradients: [
        right.average_gradients, Right.average_flat, Right.average_asynchronously,
        Right.average_by_op, Right.average_by_future, Right.average_polling,
        Right.average_functional, Right.average_functional_avg, Right.average_coalesced,
        Right.average_in_halves, Right.average_at_rank_0],
    lab.check_manual_ddp: [right.ManualDDP, PlainDDP, FunctionalDDP, AtTheEnd,
                           lambda model: wrapping(right.OverlappedDDP)(model, 700)],
}.items() for answer in answers], ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
