"""What the checks of notebook 02 must reject, with the words that must say why; and what they
must accept."""

import contextlib
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions

import labs.manual_ddp as lab
from labs.training.presets import preset

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")

right = definitions("02_manual_ddp", PRESET=preset("laptop"))
broadcast_state, make_buckets = right.broadcast_state, right.make_buckets
start, finish, OverlappedDDP = right.start, right.finish, right.OverlappedDDP


def N():
    return dist.get_world_size()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def zeros_for_none(model):
    for parameter in trainable(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return trainable(model)


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


WRONG = {}
WRONG[lab.check_combine] = [
    (Combine.plain_mean, "plain mean of the gradients"),
    (Combine.plain_sum, "is the sum of the gradients"),
    (Combine.weights_not_normalised, "the direction is right, the length is 12x"),
    (Combine.weights_by_the_largest, "is the sum of the gradients"),
    (Combine.only_the_largest_shard, "differs from the full batch's gradient"),
    (Combine.a_list, "returned a list of "),
    (Combine.nothing, "returned nothing .None., not a gradient")]


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


WRONG[lab.check_broadcast_state] = [
    (Broadcast.nothing, "nothing was communicated"),
    (Broadcast.buffers_forgotten, "buffer 'shift' is still this rank's own"),
    (Broadcast.frozen_forgotten, "parameter 'scale' is still this rank's own"),
    (Broadcast.averaged, "rank 0's own state changed"),
    (Broadcast.from_every_rank, "not in the same collective"),
    (Broadcast.from_the_last_rank, "rank 0's own state changed"),
    (Broadcast.into_a_copy, "is still this rank's own"),
    (Broadcast.new_parameters, "replaced by new ones"),
    (Broadcast.only_on_rank_0,
     "rank 1 calls no further collective: it has left your function")]


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


WRONG[lab.check_average_gradients] = [
    (Average.nothing, "still this rank's own: it was not averaged"),
    (Average.a_sum, "is the SUM over ranks, 2.0x the reference's"),
    (Average.only_divided, "own divided by 2: nothing was summed"),
    (Average.divided_by_two, "is 1.5x the reference's on 3 ranks"),
    (Average.divided_twice, "mean divided by 2 once more"),
    (Average.parameters_averaged, "parameter 'embedding.weight' after averaging"),
    (Average.none_skipped, "takes part with zeros"),
    (Average.none_communicated, "rank 1 calls all_reduce of None"),
    (Average.reduced_to_rank_0, "rank 1, parameter"),
    (Average.rank_0s_gradients, "rank 0, parameter .* still this rank's own"),
    (Average.first_parameter_only, "parameter 'first.weight': gradient is still this rank's own"),
    (Average.everything_gathered, "2.0x the .* bytes of its gradients"),
    (Average.frozen_too, "'scale' is frozen, and now has a gradient"),
    (Average.torchs_ddp, "torch's own DistributedDataParallel does the work")]


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


WRONG[lab.check_manual_ddp] = [
    (DoesNothing, "rank 1, parameter 'scale' after wrapping: it was left as this rank built it"),
    (TorchInside, "torch's own DistributedDataParallel does the work"),
    (NoStart, "rank 1, parameter 'scale' after wrapping"),
    (Sums, "step 0, parameter .* is the SUM over ranks"),
    (Once, "step 1, parameter .* still this rank's own"),
    (TensorHook, "still this rank's own"),
    (HookReturns, "hooks should return None"),
    (AveragesParameters, "still this rank's own"),
    (FrozenHook, "cannot register a hook on a tensor that doesn't require gradient"),
    (TwoHooks, "2.0x the 6,388 bytes of its gradients"),
    (InForward, "step 0, parameter .* still this rank's own")]


# 2.5 make_buckets


class Buckets:
    def all_in_one(parameters, cap):
        return [[p for p in parameters if p.requires_grad][::-1]]

    def one_each(parameters, cap):
        return [[p] for p in list(parameters)[::-1] if p.requires_grad]

    def first_layer_first(parameters, cap):
        return [b[::-1] for b in make_buckets(parameters, cap)[::-1]]

    def last_one_dropped(parameters, cap):
        return make_buckets(parameters, cap)[:-1]

    def counts_elements(parameters, cap):
        return make_buckets(parameters, cap * 4)

    def closed_after_the_cap(parameters, cap):
        buckets, size = [[]], 0
        for p in [p for p in parameters if p.requires_grad][::-1]:
            buckets[-1].append(p)
            size += p.numel() * p.element_size()
            if size >= cap:
                buckets.append([])
                size = 0
        return [b for b in buckets if b]

    def frozen_too(parameters, cap):
        parameters = list(parameters)
        frozen = [[p] for p in parameters if not p.requires_grad]
        return make_buckets(parameters, cap) + frozen

    def names(parameters, cap):
        return [["second.bias"]]

    def copies(parameters, cap):
        return [[p.clone() for p in b] for b in make_buckets(parameters, cap)]

    def mixed_types(parameters, cap):
        buckets, size = [], 0
        for p in [p for p in parameters if p.requires_grad][::-1]:
            nbytes = p.numel() * p.element_size()
            if not buckets or size + nbytes > cap:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += nbytes
        return buckets

    def an_empty_one(parameters, cap):
        return [[], *make_buckets(parameters, cap)]

    def nothing(parameters, cap):
        return None


WRONG[lab.check_make_buckets] = [
    (Buckets.nothing, "must return lists of the model's own parameters"),
    (Buckets.all_in_one, "bucket 0 has .* bytes, the cap is 900"),
    (Buckets.one_each, "it would fit"),
    (Buckets.first_layer_first, "not with the last layer"),
    (Buckets.last_one_dropped, "'embedding.weight' is in no bucket"),
    (Buckets.counts_elements, "the cap is 900"),
    (Buckets.closed_after_the_cap, "the cap is 900"),
    (Buckets.frozen_too, "'scale' is frozen and has no gradient to send"),
    (Buckets.names, "must return lists of the model's own parameters"),
    (Buckets.copies, "must return lists of the model's own parameters"),
    (Buckets.an_empty_one, "one bucket is empty"),
    (Buckets.mixed_types, "dtype")]


# 2.6 start and finish


class Bucket:
    def two_calls(bucket):
        flat, handle = start(bucket)
        dist.all_reduce(flat.clone())
        return flat, handle

    def waits_in_start(bucket):
        flat, handle = start(bucket)
        handle.wait()
        return flat, handle

    def returns_nothing(bucket):
        start(bucket)

    def returns_one(bucket):
        return start(bucket)[0]

    def synchronous(bucket):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                          for p in bucket])
        dist.all_reduce(flat)
        return flat, torch.futures.Future()

    def one_call_each(bucket):
        works = [dist.all_reduce(p.grad, async_op=True) for p in zeros(bucket)]
        return None, works

    def none_left_out(bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        return flat, dist.all_reduce(flat, async_op=True)

    def last_one_dropped(bucket):
        return start(bucket[:-1])

    def nothing(bucket):
        return None, None

    def does_not_wait(bucket, flat, handle):
        for parameter, piece in zip(bucket, pieces(bucket, flat / N()), strict=True):
            parameter.grad = piece.view_as(parameter)

    def a_sum(bucket, flat, handle):
        handle.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat), strict=True):
            parameter.grad = piece.view_as(parameter)

    def not_put_back(bucket, flat, handle):
        handle.wait()
        flat /= N()

    def stays_flat(bucket, flat, handle):
        handle.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat / N()), strict=True):
            parameter.grad = piece.clone().view(*parameter.shape, 1)

    def in_the_wrong_order(bucket, flat, handle):
        finish(bucket[::-1], flat, handle)


def zeros(bucket):
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return bucket


def pieces(bucket, flat):
    return flat.split([parameter.numel() for parameter in bucket])


WRONG_PAIRS = [
    (Bucket.nothing, finish, "start called 0 collectives"),
    (Bucket.two_calls, finish, "start called 2 collectives"),
    (Bucket.waits_in_start, finish, "start waits for its all-reduce"),
    (Bucket.returns_nothing, finish, "start returned nothing .None."),
    (Bucket.returns_one, finish, "start returned one Tensor"),
    (Bucket.synchronous, finish, "start waits for its all-reduce"),
    (Bucket.one_call_each, finish, "start called 4 collectives"),
    (Bucket.none_left_out, finish, "not in the same collective"),
    (Bucket.last_one_dropped, finish, "carries 30 elements, the bucket has 31"),
    (start, Bucket.does_not_wait, "was used before it arrived: finish does not wait"),
    (start, Bucket.a_sum, "is the SUM over ranks"),
    (start, Bucket.not_put_back, "gradient 0 of the bucket is still this rank's own"),
    (start, Bucket.stays_flat, "attempting to assign a gradient of size"),
    (start, Bucket.in_the_wrong_order, "differs from the reference's")]


# 2.7 overlap, as classes over lab.BucketedWrapper


class AfterBackward(lab.BucketedWrapper):
    def backward_done(self):
        begun = [start(bucket) for bucket in self.buckets]
        for bucket, one in zip(self.buckets, begun, strict=True):
            finish(bucket, *one)


class OneForAll(lab.BucketedWrapper):
    """One all-reduce when the last gradient is ready, sold as overlap."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        everything = [p for bucket in self.buckets for p in bucket]
        if len(self.ready) == len(everything):
            finish(everything, *start(everything))


class WaitsAtOnce(lab.BucketedWrapper):
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets:
            if parameter in set(bucket) and self.ready.issuperset(bucket):
                finish(bucket, *start(bucket))


class Synchronous(lab.BucketedWrapper):
    def gradient_ready(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= N()


class UnusedForgotten(OverlappedDDP):
    """Never sends a bucket that did not get ready."""

    def backward_done(self):
        for bucket, one in zip(self.buckets, self.started, strict=False):
            finish(bucket, *one)


class AsksTheList(lab.BucketedWrapper):
    """`in` on a list of tensors compares numbers."""

    def gradient_ready(self, parameter):
        for bucket in self.buckets:
            if parameter in bucket:
                self.ready.add(parameter)


class AsTheyGetReady(lab.BucketedWrapper):
    """Starts whichever bucket is complete, in whatever order."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets:
            if parameter in set(bucket) and self.ready.issuperset(bucket):
                self.started.append((bucket, start(bucket)))

    def backward_done(self):
        sent = [p for bucket, _ in self.started for p in bucket]
        for bucket in self.buckets:
            if not set(bucket) <= set(sent):
                self.started.append((bucket, start(bucket)))
        for bucket, one in self.started:
            finish(bucket, *one)


class NotFinished(OverlappedDDP):
    def backward_done(self):
        for _, handle in self.started:
            handle.wait()


class LastBucketDropped(OverlappedDDP):
    def __init__(self, module, buckets):
        super().__init__(module, buckets)
        self.buckets = self.buckets[:-1]


class Nothing(lab.BucketedWrapper):
    pass


def wrapping(kind):
    def wrap(model, cap_bytes=800_000):
        broadcast_state(model)
        return kind(model, make_buckets(model.parameters(), cap_bytes))

    return wrap


def torch_inside(model, cap_bytes):
    return torch.nn.parallel.DistributedDataParallel(model)


WRONG[lab.check_overlap] = [
    (wrapping(Nothing), "communicates nothing"),
    (torch_inside, "torch's own DistributedDataParallel does the work"),
    (wrapping(AfterBackward), "nothing overlaps with backward"),
    (wrapping(OneForAll), "one all-reduce carries everything"),
    (wrapping(WaitsAtOnce), "waited for while gradients are still being computed"),
    (wrapping(Synchronous), "is not asynchronous"),
    (wrapping(UnusedForgotten), "rank 1 calls no further collective"),
    (wrapping(AsksTheList), "Ask a set"),
    (wrapping(AsTheyGetReady), "not in the same collective"),
    (wrapping(NotFinished), "still this rank's own"),
    (wrapping(LastBucketDropped),
     "its buckets are not those of exercise 2.5: 'embedding.weight' is in no bucket")]


# 2.8 no_sync


def no_sync_by(function):
    class Wrong(OverlappedDDP):
        no_sync = contextlib.contextmanager(function)

    return wrapping(Wrong)


def does_nothing(self):
    yield


def never_raised_again(self):
    self.synchronize = False
    yield


def not_after_an_exception(self):
    self.synchronize = False
    yield
    self.synchronize = True


def drops_what_was_accumulated(self):
    self.synchronize = False
    try:
        yield
    finally:
        self.synchronize = True
        self.module.zero_grad()


def own_gradients_lost(self):
    self.synchronize = False
    def clear(parameter):
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(clear) for p in trainable(self.module)]
    try:
        yield
    finally:
        self.synchronize = True
        [hook.remove() for hook in hooks]


def not_a_generator(self):
    self.synchronize = False


def other_flag(self):
    self.require_backward_grad_sync = False
    try:
        yield
    finally:
        self.require_backward_grad_sync = True


WRONG[lab.check_no_sync] = [
    (no_sync_by(does_nothing), "inside no_sync"),
    (no_sync_by(other_flag), "inside no_sync, self.synchronize is still True"),
    (no_sync_by(not_a_generator), "must `yield` once"),
    (no_sync_by(never_raised_again), "after no_sync, backward still communicates nothing"),
    (no_sync_by(not_after_an_exception), "an exception inside no_sync left the flag down"),
    (no_sync_by(drops_what_was_accumulated), "after no_sync, parameter"),
    (no_sync_by(own_gradients_lost), "inside no_sync its gradient is not the sum")]


# 2.9 accumulate


class Accumulate:
    def nothing(module, parts):
        pass

    def only_the_last(module, parts):
        module(**parts[-1]).loss.backward()

    def unweighted_sum(module, parts):
        for number, part in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                module(**part).loss.backward()

    def plain_mean(module, parts):
        for number, part in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                (module(**part).loss / len(parts)).backward()

    def synchronized_each_time(module, parts):
        total = sum(len(part["x"]) for part in parts)
        for part in parts:
            (module(**part).loss * len(part["x"]) / total).backward()

    def never_synchronized(module, parts):
        total = sum(len(part["x"]) for part in parts)
        for part in parts:
            with module.no_sync():
                (module(**part).loss * len(part["x"]) / total).backward()

    def all_at_once(module, parts):
        total = sum(len(part["x"]) for part in parts)
        sum(module(**part).loss * len(part["x"]) / total for part in parts).backward()

    def cleared_between(module, parts):
        total = sum(len(part["x"]) for part in parts)
        for number, part in enumerate(parts, 1):
            module.zero_grad()
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                (module(**part).loss * len(part["x"]) / total).backward()


WRONG_ACCUMULATE = [
    (Accumulate.nothing, "differs from the full batch's"),
    (Accumulate.only_the_last, "differs from the full batch's"),
    (Accumulate.unweighted_sum, "the sum of the micro-batches' mean losses"),
    (Accumulate.plain_mean, "the plain mean of the micro-batches' mean losses"),
    (Accumulate.synchronized_each_time, "12 collectives for 3 micro-batches"),
    (Accumulate.never_synchronized, "differs from the full batch's"),
    (Accumulate.all_at_once, "1 backward for 3 micro-batches"),
    (Accumulate.cleared_between, "differs from the full batch's")]


def rejected(verdict, words):
    import re

    assert verdict.passed is False, verdict
    assert re.search(words, str(verdict)), verdict
    assert "Traceback" not in str(verdict)


CASES = [(check, answer, words) for check, rows in WRONG.items() for answer, words in rows]


@pytest.mark.parametrize("check, answer, words", CASES, ids=[
    f"{check.__name__}-{getattr(answer, '__name__', '')}-{number}"
    for number, (check, answer, _) in enumerate(CASES)])
def test_wrong(check, answer, words):
    rejected(check(answer), words)


@pytest.mark.parametrize("begin, end, words", WRONG_PAIRS)
def test_wrong_bucket(begin, end, words):
    rejected(lab.check_bucket(begin, end), words)


@pytest.mark.parametrize("answer, words", WRONG_ACCUMULATE)
def test_wrong_accumulate(answer, words):
    rejected(lab.check_accumulate(answer, right.accumulating), words)


def test_every_exercise_has_at_least_five_wrong_answers():
    assert all(len(rows) >= 5 for rows in WRONG.values())
    assert len(WRONG_PAIRS) >= 5 and len(WRONG_ACCUMULATE) >= 5


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

    def broadcast_objects(model):
        box = [model.state_dict()]
        dist.broadcast_object_list(box, src=0)
        model.load_state_dict(box[0])

    def broadcast_gathered(model):
        for tensor in model.state_dict().values():
            everyone = [torch.empty_like(tensor) for _ in range(N())]
            dist.all_gather(everyone, tensor)
            tensor.copy_(everyone[0])

    def average_flat(model):
        parameters = zeros_for_none(model)
        flat = torch.cat([p.grad.flatten() for p in parameters]) / N()
        dist.all_reduce(flat)
        for parameter, piece in zip(parameters, pieces(parameters, flat), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))

    def average_asynchronously(model):
        works = [dist.all_reduce(p.grad, async_op=True) for p in zeros_for_none(model)]
        for work, parameter in zip(works, trainable(model), strict=True):
            work.wait()
            parameter.grad.div_(N())

    def start_in_place(bucket):
        flat = torch.empty(sum(p.numel() for p in bucket))
        offset = 0
        for parameter in bucket:
            end = offset + parameter.numel()
            flat[offset:end] = 0 if parameter.grad is None else parameter.grad.flatten()
            offset = end
        return [dist.all_reduce(flat, async_op=True), flat]

    def finish_in_place(bucket, work, flat):
        work.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat), strict=True):
            parameter.grad = (piece / N()).reshape(parameter.shape)


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


class CountingDDP(lab.BucketedWrapper):
    """Counts instead of keeping a set."""

    def __init__(self, module, buckets):
        super().__init__(module, buckets)
        self.home = {id(p): n for n, bucket in enumerate(buckets) for p in bucket}
        self.missing = [len(bucket) for bucket in buckets]

    def gradient_ready(self, parameter):
        self.missing[self.home[id(parameter)]] -= 1
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            self.started.append(start(self.buckets[len(self.started)]))

    def backward_done(self):
        while len(self.started) < len(self.buckets):
            self.started.append(start(self.buckets[len(self.started)]))
        for bucket, one in zip(self.buckets, self.started, strict=True):
            finish(bucket, *one)
        self.missing = [len(bucket) for bucket in self.buckets]


def accumulate_by_list(module, parts):
    sizes = torch.tensor([float(len(part["x"])) for part in parts])
    *first, last = zip(parts, (sizes / sizes.sum()).tolist(), strict=True)
    with module.no_sync():
        for part, weight in first:
            (weight * module(**part).loss).backward()
    (last[1] * module(**last[0]).loss).backward()


@pytest.mark.parametrize("check, answers", [
    (lab.check_combine, [right.combine]), (lab.check_combine, [Right.combine]),
    (lab.check_combine, [Right.combine_by_a_loop]),
    (lab.check_broadcast_state, [right.broadcast_state]),
    (lab.check_broadcast_state, [Right.broadcast_objects]),
    (lab.check_broadcast_state, [Right.broadcast_gathered]),
    (lab.check_average_gradients, [right.average_gradients]),
    (lab.check_average_gradients, [Right.average_flat]),
    (lab.check_average_gradients, [Right.average_asynchronously]),
    (lab.check_manual_ddp, [right.ManualDDP]), (lab.check_manual_ddp, [PlainDDP]),
    (lab.check_manual_ddp, [lambda model: wrapping(CountingDDP)(model, 700)]),
    (lab.check_make_buckets, [right.make_buckets]),
    (lab.check_bucket, [right.start, right.finish]),
    (lab.check_bucket, [Right.start_in_place, Right.finish_in_place]),
    (lab.check_overlap, [right.overlapped]), (lab.check_overlap, [wrapping(CountingDDP)]),
    (lab.check_no_sync, [right.accumulating]),
    (lab.check_accumulate, [right.accumulate, right.accumulating]),
    (lab.check_accumulate, [accumulate_by_list, right.accumulating])])
def test_right(check, answers):
    verdict = check(*answers)
    assert verdict.passed is True, verdict
