"""Exercise 4.6: a model built on the meta device, sharded, and initialised shard by shard."""

import contextlib
import warnings
from collections.abc import Callable
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from labs.checks.invariants import judge_outside_torch
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.verdicts import Wrong, check
from labs.fsdp import scaffold
from labs.fsdp.strategy_checks import TIMEOUT, batches, build, judge_optimizer, whole_parameters
from labs.fsdp.unit_errors import require_units_in_model
from labs.meters import memory
from labs.meters.traffic import Traffic
from labs.training import models, strategies
from labs.words import counted

RANKS, REPLICAS = 4, 2
CONTEXT = 22
MANY = 500  # numbers: from here on their standard deviation is a test of how they were drawn
APART = 0.25  # relative: of that deviation and the model's own
SETTINGS = {"lr": 1e-2}
_DRAW = ("to_empty gives memory with whatever lay in it. Hugging Face's modules have no "
         "reset_parameters: model.apply(model._init_weights) draws their numbers.")


def _gpt2():
    return models.gpt2(layers=4, hidden=46, heads=2, context=CONTEXT)


def _qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=models.VOCABULARY, hidden_size=40, intermediate_size=50, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, use_cache=False))


@check("4.6", hints={"meta tensor": "Only shapes are there yet: give the parameters memory with "
                                    "to_empty, then numbers.",
                     "materialized from meta": "module.to_empty(device=lab.device()) gives the "
                                               "shards memory; then draw their numbers.",
                     "Cannot copy out of meta": "to_empty gives memory; .to(...) would copy "
                                                "numbers that do not exist."})
def check_from_meta(strategy: Callable) -> str:
    """strategy(make_model, optimizer_class, **settings) -> (module, optimizer): make_model(), one
    of Hugging Face's models, is called where it costs no memory; each rank gets only its shards."""
    on_ranks(_build_and_train, strategy, world_sizes=(RANKS,), timeout=TIMEOUT)
    return (f"no rank of {RANKS} ever held the full model; every shard has numbers of its own, "
            "drawn as the model draws them (GPT-2 and a tied Qwen2), replicas are equal, and they "
            "train")


def _build_and_train(strategy):
    # Each shard's numbers come from its rank's own generator, which is what the exercise is about:
    # torch's warning of that would stand below every verdict, unexplained.
    warnings.filterwarnings("ignore", message="DTensor random operators")
    own = batches(1, 2, CONTEXT, seed=dist.get_rank())
    report = memory.record(lambda: build(strategy, _gpt2, **SETTINGS), own,
                           strategies.resident_tensors, outside=True)
    raise_on_all_ranks(_judge_build, report)
    for make_model, replicas in ((_gpt2, 1), (_qwen2, 1), (_gpt2, REPLICAS)):
        with scaffold.replicated(replicas):
            _judge_one(strategy, make_model, own[0])


def _judge_one(strategy, make_model, batch):
    torch.manual_seed(0)
    own = models.move_to_rank(make_model())
    with _memory_filled():
        module, optimizer = build(strategy, make_model, **SETTINGS)
    raise_on_all_ranks(_judge_shards, module, own)
    raise_on_all_ranks(judge_optimizer, module, optimizer, SETTINGS)
    before = whole_parameters(module)
    raise_on_all_ranks(_judge_numbers, before, own)
    raise_on_all_ranks(_judge_buffers, module, own)
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, _pieces(module))
    raise_on_all_ranks(_judge_pieces, pieces)
    raise_on_all_ranks(_judge_layers, before)
    with Traffic() as traffic:
        module(**batch).loss.backward()
    raise_on_all_ranks(_judge_units, traffic, len(models.blocks(own)))
    optimizer.step()
    raise_on_all_ranks(_judge_step, before, whole_parameters(module))


@contextlib.contextmanager
def _memory_filled():
    """Fills memory that nobody wrote with NaN: what an earlier model left there looks right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _judge_build(report):
    # The peak while building stays near a shard: a module built first and sharded then held all.
    whole = 4 * models.count_trainable(_gpt2())
    peak = report.peaks["build"].total
    if peak > 0.6 * whole:
        raise Wrong(f"rank {dist.get_rank()} held {peak:,} bytes while the model was built; the "
                    f"full model is {whole:,}, a quarter of it {whole // RANKS:,}",
                    "Make it inside `with torch.device(\"meta\"):`, shard it, and only then give "
                    "it memory.", code="peak_too_high")
    judge_outside_torch(report)


def _judge_shards(module, own):
    rank, names = f"rank {dist.get_rank()}", dict(own.named_parameters())
    require_units_in_model(module)
    for name, parameter in module.named_parameters():
        # A weight that two modules share stays one parameter.
        if name not in names:
            raise Wrong(f"{rank}: {name!r} is a parameter of its own now; in the model two modules "
                        "share it", "to_empty unties what is not sharded yet: shard first, or tie "
                        "again, model.tie_weights(), before the optimizer is made.",
                        code="tie_lost")
        # Every parameter is a shard with memory.
        if not isinstance(parameter, DTensor):
            raise Wrong(f"{rank}: {name!r} is not sharded", "shard(model, ...) before to_empty.",
                        code="not_sharded")
        if parameter.device.type == "meta":
            raise Wrong(f"{rank}: {name!r} is on the meta device still: it has a shape, and no "
                        "memory", "module.to_empty(device=...) gives it memory.",
                        code="still_on_meta")


def _judge_numbers(parameters, own):
    # Constant parameters (biases, norms) have the constant of a model that is built as usual, and
    # the others its deviation: what to_empty left lying in memory has neither.
    for name, want in own.named_parameters():
        value, usual = parameters[name], want.detach()
        who = f"rank {dist.get_rank()}, parameter {name!r}"
        if not value.isfinite().all():
            raise Wrong(f"{who}: it has numbers that nobody drew (here such memory is filled with "
                        "nan)", _DRAW, code="not_initialized")
        if usual.min() == usual.max():
            if not torch.equal(value, usual):
                raise Wrong(f"{who}: it should be {usual.flatten()[0]:g} everywhere, as in a model "
                            "that is built as usual", _DRAW, code="wrong_initial_value")
        elif value.numel() > MANY:
            _judge_deviation(who, value.std().item(), usual.std().item(),
                             own.config.initializer_range)


def _judge_deviation(who, found, usual, unscaled):
    if abs(found / usual - 1) <= APART:
        return
    order = abs(found / unscaled - 1) < APART  # drawn, but not scaled by the module around it
    raise Wrong(f"{who}: its numbers have a standard deviation of {found:.2g}; in a model that is "
                f"built as usual it is {usual:.2g}",
                "model.apply visits a module after its children, and scales what they drew. A loop "
                "over model.modules() visits it before them; init_weights() takes a sharded model "
                "for custom code and skips modules without a parameter of their own." if order else
                "Each model draws its numbers in its own way: model.apply(model._init_weights).",
                code="initialized_twice")


def _judge_buffers(module, own):
    # Buffers are empty after to_empty too: positions that a model computes once, for example.
    want = dict(own.named_buffers())
    for name, value in module.named_buffers():
        if not torch.allclose(value, want[name]):
            raise Wrong(f"rank {dist.get_rank()}, buffer {name!r}: it differs from that of a model "
                        "that is built as usual", _DRAW, code="buffer_not_initialized")


def _pieces(module) -> dict[str, tuple]:
    """Returns name -> (place among the shards, number of the rank's replica, first numbers)."""
    found = {}
    for name, parameter in module.named_parameters():
        at = parameter.device_mesh.get_coordinate()
        sharded = [placement.is_shard() for placement in parameter.placements]
        place = tuple(c for c, shard in zip(at, sharded, strict=True) if shard)
        numbers = parameter.to_local().detach().flatten()[:64].tolist()
        found[name] = place, numbers
    return found


def _judge_pieces(by_rank):
    for name in by_rank[0]:
        for one, other in combinations(range(len(by_rank)), 2):
            (place, numbers), (its_place, its) = by_rank[one][name], by_rank[other][name]
            who = f"parameter {name!r}: ranks {one} and {other}"
            # Ranks of two replicas that hold the same shard must have the same numbers: their
            # gradients are averaged from now on, and nothing ever makes the numbers equal.
            if place == its_place and numbers != its:
                raise Wrong(f"{who} hold the same shard of two replicas, and different numbers",
                            "The seed depends on the place among the shards, not on the rank: "
                            "lab.mesh().get_local_rank(\"shard\").", code="replicas_differ")
            # On a CPU mesh DTensor's random operators draw with each rank's own generator, so
            # equal seeds give equal shards. Constants may repeat, and the last shard is smaller.
            both = min(len(numbers), len(its))
            if place != its_place and both > 16 and len(set(numbers)) > 1 \
                    and numbers[:both] == its[:both]:
                raise Wrong(f"{who} hold different shards, and the same numbers",
                            "A CPU draws each shard with its rank's own generator: another seed "
                            "for each shard, torch.manual_seed(...), before the numbers are drawn.",
                            code="shards_equal")


def _judge_layers(parameters):
    # Two layers differ too: a seed that is set inside the loop over modules repeats the numbers.
    starts = {}
    for name, value in parameters.items():
        start = tuple(value.flatten()[:4].tolist())
        if len(set(start)) > 1 and start in starts:
            raise Wrong(f"rank {dist.get_rank()}: {starts[start]!r} and {name!r} have the same "
                        "numbers", "Set the seed once, before the modules are visited.",
                        code="parameters_equal")
        starts[start] = name


def _judge_units(traffic, blocks):
    # One reduce-scatter for each block and for the root: a single unit gathers all at once.
    found = sum(call.elements > 0 for call in traffic.of("reduce_scatter"))
    if found != blocks + 1:
        raise Wrong(f"rank {dist.get_rank()}: gradients leave in {counted(found, 'unit')}; "
                    f"{blocks} blocks and the root make {blocks + 1}",
                    "shard(model, ...) of exercise 4.1.", code="wrong_units")


def _judge_step(before, after):
    # The optimizer holds the parameters that the model has now: one made before sharding does not.
    for name, value in after.items():
        if torch.equal(value, before[name]):
            raise Wrong(f"rank {dist.get_rank()}, parameter {name!r}: a step does not change it",
                        "fully_shard replaces the parameters: make the optimizer after it.",
                        code="not_updated")
