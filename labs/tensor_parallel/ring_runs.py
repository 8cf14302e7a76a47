"""What is measured with a student's ring on ranks, to be plotted."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labs.meters import memory
from labs.start_here.recorded_collectives import run
from labs.tensor_parallel.attention_blocks import Places, in_tiles, recorded_pairs
from labs.tensor_parallel.ring_cases import (
    Shape,
    WholeSequence,
    contiguous_places,
    places_of_chunks,
    record_attention,
)
from labs.training import data, models
from labs.workers import devices

LONG = Shape(1, 4, 4, 1024, 16)  # tokens: of the whole sequence
RANKS = 4
CONTEXT = 256  # tokens that the small Llama sees
_FACTOR = 4  # as long as usual for gloo's thread to drop what it holds


@dataclass(frozen=True)
class LlamaRun:
    """A small Llama on the pieces of a text. tokens: on each rank. loss: of all tokens. logits,
    gradients: largest difference from the model that sees the whole text."""

    tokens: int
    loss: float
    logits: float
    gradients: float


def origins(pass_on: Callable) -> list[list[int]]:
    """Pass -> rank -> whose piece it has."""
    with devices.send_recv_device(RANKS):
        by_rank = run(_origins, pass_on, ranks=RANKS)
    return [list(column) for column in zip(*by_rank, strict=True)]


def _origins(pass_on):
    held = [torch.full((3,), dist.get_rank(), device=devices.device())]
    found = [dist.get_rank()]
    for _ in range(dist.get_world_size() - 1):
        held = pass_on(held, dist.group.WORLD)
        found.append(int(held[0][0]))
    return found


def peaks(ring_attention: Callable, ranks: int) -> tuple[int, int]:
    """Bytes at the peak of the rank with most, with the scores of a block in memory, and where each
    block is computed in tiles."""
    with devices.send_recv_device(ranks):
        found = run(_peaks, ring_attention, ranks=ranks)
    blocks, tiles = zip(*found, strict=True)
    return max(blocks), max(tiles)


def _peaks(ring_attention):
    group = dist.group.WORLD
    _run_once(ring_attention, group)  # on a GPU, cuBLAS's workspaces come with the first run
    tokens = LONG.tokens // group.size()
    found = []
    for tiles in (nullcontext(), in_tiles()):
        sequence = WholeSequence(replace(LONG, tokens=tokens), group,
                                 contiguous_places(tokens, group.size()))
        with tiles, memory.wait_longer(_FACTOR):
            found.append(record_attention(ring_attention, sequence).step_peak.total)
    return found


def _run_once(attention, group):
    """Forward and backward of a few tokens."""
    shape = Shape()
    few = WholeSequence(shape, group, contiguous_places(shape.tokens, group.size()))
    attention(*few.inputs(), few.positions, group).backward(few.piece(few.weights))


def measured_rounds(ring_attention: Callable, places: Places) -> list[list[int]]:
    """Round -> rank -> pairs that it was asked for, counted while the student's ring ran."""
    with devices.send_recv_device(len(places)):
        by_rank = run(_measured_pairs, ring_attention, places, ranks=len(places))
    return [list(column) for column in zip(*by_rank, strict=True)]


def _measured_pairs(ring_attention, places):
    sequence = WholeSequence(Shape(tokens=len(places[0])), dist.group.WORLD, places)
    with recorded_pairs() as pairs, torch.no_grad():
        ring_attention(*sequence.inputs(), sequence.positions, sequence.group)
    return pairs


def llama_runs(ring_attention: Callable, assignment: list[list[int]]) -> LlamaRun:
    """A small Llama, each rank on its chunks of one text."""
    with devices.send_recv_device(len(assignment)):
        return run(_llama, ring_attention, assignment, ranks=len(assignment))[0]


def _llama(ring_attention, assignment):
    chunks = sum(map(len, assignment))
    positions = places_of_chunks(assignment, CONTEXT // chunks)[dist.get_rank()]
    window = data.windows(1, CONTEXT).to(devices.device())  # (1, tokens + 1)
    text, following = window[:, :-1], window[:, 1:]  # shifted before the text is cut
    whole, cut = (models.move_to_rank(models.llama(layers=2, hidden=64, context=CONTEXT))
                  for _ in range(2))
    positions = positions.to(text.device)
    use_attention(cut, lambda q, k, v: ring_attention(q, k, v, positions, dist.group.WORLD))
    wanted = whole(input_ids=text).logits  # (1, tokens, vocabulary)
    _mean_loss(wanted, following, CONTEXT).backward()
    # position_ids, because the rotary embedding would count this rank's tokens from 0.
    logits = cut(input_ids=text[:, positions], position_ids=positions[None]).logits
    loss = _mean_loss(logits, following[:, positions], CONTEXT)
    loss.backward()
    total = loss.detach().clone()
    # Each rank's loss is its tokens' sum over the tokens of all ranks, so loss and gradients are
    # summed, not averaged.
    for tensor in (total, *(p.grad for p in cut.parameters())):
        dist.all_reduce(tensor)
    off = max((a.grad - b.grad).abs().max().item()
              for a, b in zip(cut.parameters(), whole.parameters(), strict=True))
    differences = torch.tensor([(logits - wanted[:, positions]).abs().max().item(), off])
    dist.all_reduce(differences, dist.ReduceOp.MAX)
    return LlamaRun(len(positions), total.item(), *differences.tolist())


def _mean_loss(logits, targets, tokens):
    """The sum over these tokens, divided by the tokens of all ranks."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens


def use_attention(model: torch.nn.Module, attention: Callable) -> None:
    """Makes a Hugging Face model use attention(q, k, v) in every layer, and no mask: the function
    knows the positions of its tokens."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module, q, k, v, mask, **_):
        # From (batch, heads, tokens, d) to (batch, tokens, heads, d), which the output layer reads;
        # None for the attention weights.
        return attention(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("ring", attend)
    AttentionMaskInterface.register("ring", lambda *_, **__: None)
    model.set_attn_implementation("ring")


def torchs_context_parallel() -> str | tuple[str, float]:
    """On a rank: what torch's context_parallel raised, or the device and the largest difference of
    its output from full attention."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device, ranks = devices.device(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(0)
    # Flash attention takes 16-bit numbers only.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 4, 64 * ranks, 16, dtype=dtype).to(device) for _ in range(3))
    with torch.no_grad():
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        try:
            # `want` is one of the buffers: context_parallel shards and reorders it as it does q, k
            # and v.
            with context_parallel(mesh, buffers=[q, k, v, want], buffer_seq_dims=[2] * 4), \
                    sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return device.type, (out - want).abs().max().item()
        except (NotImplementedError, RuntimeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
