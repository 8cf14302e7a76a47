"""Exercise 2.5: how parameters are split into buckets."""

from collections.abc import Callable

import torch
from torch import nn

from labs.checks import comparison
from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.manual_ddp.api_hints import API_HINTS
from labs.manual_ddp.edge_cases import NESTED_CAP, NestedModel, mixed_model
from labs.pictures import shards
from labs.pictures.widgets import Choice, Controls
from labs.training.models import EdgeCaseModel, trainable
from labs.training.presets import Preset

Buckets = list[list[nn.Parameter]]


@check("2.5", hints=API_HINTS)
def check_make_buckets(make_buckets):
    """make_buckets(parameters, cap_bytes) returns a list of lists of trainable parameters, the last
    first, and leaves a list that it is given as it is. parameters: any iterable."""
    for model, cap in _cases():
        judge_buckets(make_buckets(model.parameters(), cap), model, cap)
    _judge_input(make_buckets, EdgeCaseModel())
    frozen = EdgeCaseModel().requires_grad_(False)
    judge_buckets(make_buckets(frozen.parameters(), 900), frozen, 900)
    return "every trainable parameter is in one bucket, last layer first, within the cap"


def _cases():
    # 280: the last two parameters fill it exactly; 10: every parameter is larger, also the first
    for cap in (900, 400, 2000, 280, 10, 10**6, new_generator().randrange(300, 3000, 4)):
        yield EdgeCaseModel(), cap
    # the parameter that comes first is larger than the cap, and a small one follows
    yield NestedModel(), NESTED_CAP
    for layer in ("second", "first"):
        mixed = EdgeCaseModel()
        getattr(mixed, layer).to(torch.float64)
        yield mixed, 900
    # the dtype changes twice; and bytes are not 4 for each element
    for model, cap in ((mixed_model(), NESTED_CAP), (mixed_model(), 10**6),
                       (EdgeCaseModel().to(torch.float64), 900),
                       (EdgeCaseModel().to(torch.bfloat16), 500)):
        yield model, cap


def _judge_input(make_buckets, model):
    given = list(model.parameters())
    judge_buckets(make_buckets(given, 900), model, 900)
    # the caller's list, turned round or emptied, would be another one for its next reader
    if [id(p) for p in given] != [id(p) for p in model.parameters()]:
        raise Wrong("make_buckets changed the list that it was given",
                    "Make a new list: reversed(parameters) or parameters[::-1].",
                    code="changes_input")


def judge_buckets(buckets: Buckets, model: nn.Module, cap: int | None = None) -> None:
    """Raises Wrong where the buckets are not as exercise 2.5 wants them; cap None: of any size."""
    _judge_lists(buckets)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        by_bucket = [[names[id(parameter)] for parameter in bucket] for bucket in buckets]
    except KeyError:
        raise Wrong("a bucket holds something else than the model's own parameters",
                    "A list of lists, with the parameters themselves, not copies.",
                    code="not_own_parameters") from None
    want = [name for name, _ in trainable(model)][::-1]
    _judge_complete([name for bucket in by_bucket for name in bucket], want)
    # a bucket without parameters would be an all-reduce of nothing
    if [] in by_bucket:
        raise Wrong("one bucket is empty", "Open a bucket only when there is something for it.",
                    code="empty_bucket")
    for number, bucket in enumerate(buckets):
        # torch.cat would promote a mixed bucket: the lower precision would be sent as the higher
        types = sorted({str(p.dtype).removeprefix("torch.") for p in bucket})
        if len(types) > 1:
            raise Wrong(f"bucket {number} mixes {' and '.join(types)}: no tensor can hold both",
                        "Open a new bucket where the dtype changes.", code="mixed_dtypes")
    _judge_order(by_bucket, want, [bucket[0].dtype for bucket in buckets])
    if cap is not None:
        _judge_sizes(buckets, by_bucket, dict(trainable(model)), cap)


def _judge_lists(buckets):
    # a generator is empty after it was read once, a set has no order: backward reads the buckets
    # in every step
    inner = buckets if isinstance(buckets, list | tuple) else [buckets]
    for found in (buckets, *inner):
        if not isinstance(found, list | tuple):
            where = "make_buckets returned" if found is buckets else "a bucket is"
            raise Wrong(f"{where} {kind_of(found)}, not a list",
                        "Return a list of lists of parameters.", code="wrong_type")


def _judge_complete(order, want):
    frozen = [name for name in order if name not in want]
    if frozen:
        raise Wrong(f"{frozen[0]!r} is frozen and has no gradient to send",
                    "Leave out parameters with requires_grad=False.", code="frozen_parameter")
    # a parameter in no bucket is never averaged: the ranks drift apart
    missing = [name for name in want if name not in order]
    if missing:
        hint = ("Is the last bucket, which is not full, in the list, too?"
                if missing == want[-len(missing):] else
                "Every trainable parameter has a bucket, also one above the cap.")
        raise Wrong(f"{', '.join(map(repr, missing))} is in no bucket", hint, code="missing_entry")
    if len(order) > len(want):
        twice = next(name for name in order if order.count(name) > 1)
        raise Wrong(f"{twice!r} is in {order.count(twice)} buckets, or twice in one",
                    "Once is enough.", code="duplicate_entry")


def _judge_order(by_bucket, want, types):
    # backward completes gradients from the last layer to the first: in another order a bucket waits
    # for its last gradient while others are complete, and less overlaps
    place = {name: number for number, name in enumerate(want)}
    places = [[place[name] for name in bucket] for bucket in by_bucket]
    # buckets of several dtypes may be open at a time, so they are sent as they begin or as they end
    in_order = places == sorted(places) or places == sorted(places, key=lambda bucket: bucket[-1])
    unsorted = [number for number, bucket in enumerate(places) if bucket != sorted(bucket)]
    # all of one dtype first, though some of another get ready before them
    groups = [[bucket for bucket, other in zip(places, types, strict=True) if other == one]
              for one in set(types)]
    if not in_order and len(groups) > 1 and all(group == sorted(group) for group in groups):
        raise Wrong("the buckets are in order for each dtype, but not all together",
                    "Backward completes gradients of all dtypes in turn: go through the parameters "
                    "once, in reverse; a change of dtype closes a bucket.", code="grouped_by_dtype")
    if (unsorted or not in_order) and places[0][0] != 0:
        raise Wrong(f"the first bucket begins with {by_bucket[0][0]!r}, not with the last layer",
                    "Backward reaches the last layer first: go through the parameters in reverse.",
                    code="not_last_layer_first")
    if unsorted:
        raise Wrong(f"the parameters of bucket {unsorted[0]} are not in backward's order",
                    "Go through the parameters in reverse, and append.",
                    code="wrong_order_in_bucket")
    if not in_order:
        raise Wrong("the buckets are not in backward's order", "Append each bucket at the end.",
                    code="wrong_order")


def _judge_sizes(buckets, by_bucket, parameters, cap):
    sizes = [sum(p.numel() * p.element_size() for p in bucket) for bucket in buckets]
    home = {name: number for number, bucket in enumerate(by_bucket) for name in bucket}
    for number, bucket in enumerate(by_bucket):
        if len(bucket) > 1 and sizes[number] > cap:
            raise Wrong(f"bucket {number} has {sizes[number]} bytes, the cap is {cap}",
                        "Close a bucket before it would exceed the cap; count bytes with "
                        "numel() * element_size(). A parameter above the cap has one to itself.",
                        code="cap_exceeded")
    order = list(parameters)[::-1]
    for name, following in zip(order, order[1:], strict=False):
        nbytes = parameters[following].numel() * parameters[following].element_size()
        # a bucket for each parameter is within any cap, but saves no call
        if (home[name] != home[following] and sizes[home[name]] + nbytes <= cap
                and parameters[name].dtype == parameters[following].dtype):
            raise Wrong(f"with a cap of {cap} bytes, bucket {home[name]} has {sizes[home[name]]} "
                        f"bytes and the next parameter, {following!r}, has {nbytes}: it would fit",
                        "Fill a bucket up to the cap, in bytes, before you open the next.",
                        code="bucket_not_filled")


def judged_buckets(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Returns wrap, but its buckets are judged first: a parameter that is in none of them is not a
    mistake of the hooks."""
    def wrapped(model):
        module = wrap(model)
        if hasattr(module, "buckets"):
            try:
                judge_buckets(module.buckets, model)
            except Wrong as wrong:
                raise wrong.said_of("its buckets are not those of exercise 2.5") from None
        return module

    return wrapped


CAPS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 25.0)  # MB, the slider's


@shows("2.5")
def explore_buckets(make_buckets: Callable, preset: Preset) -> Controls:
    """Draws how the preset's GPT-2 is split into buckets, for a cap that a slider moves; without a
    live kernel, for the preset's cap, which the guess is about."""
    model = comparison.model_of(preset)
    names = {id(parameter): name.removeprefix("transformer.")
             for name, parameter in model.named_parameters()}

    def picture(cap_mb):
        cut = make_buckets(model.parameters(), cap_mb * 1e6)
        return shards.bucket_bar([[(names[id(p)], p.numel() * p.element_size()) for p in bucket]
                                   for bucket in cut], cap_mb * 1e6,
                                 guessed("2.5") if cap_mb == cap else None)

    cap = preset.cap_bytes / 1e6
    options = [(f"{each:g}", each) for each in sorted({*CAPS, cap})]
    return Controls([Choice("cap_mb", "cap, MB", options, cap)], picture)
