"""A small language model with mixture-of-experts layers, in plain torch, and the layer computed as
it is defined: expert after expert, on one rank. It is the reference of notebook 09."""

import torch
from torch import nn
from torch.nn import functional as F

from labs.training.models import VOCABULARY, ModelOutput


class Experts(nn.Module):
    """Gated MLPs, stacked: gate_up (experts, 2 · ffn, hidden), down (experts, hidden, ffn), as in
    Hugging Face's classes since transformers 5.

    forward(copies, counts): copies (n, hidden) sorted by expert; counts: list of how many belong to
    each. Returns (n, hidden).
    """

    def __init__(self, experts: int, hidden: int, ffn: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * ffn, hidden) / hidden ** 0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, ffn) / ffn ** 0.5)

    def forward(self, copies, counts):
        return torch.cat([gated_mlp(*each) for each in zip(
            copies.split(counts), self.gate_up, self.down, strict=True)])


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down · (silu(gate · x) · (up · x)) of x (n, hidden); gate_up (2 · ffn, hidden)."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class SharedExpert(nn.Module):
    """A gated MLP that every token uses, as in DeepSeek-V3."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return gated_mlp(x, self.gate_up.weight, self.down.weight)


class ExpertLayer(nn.Module):
    """A mixture-of-experts layer, computed by the loop over experts.

    k: experts that each token uses. shared: with an expert that every token uses. The weights of a
    token's k experts add up to 1 (Mixtral; Qwen3 with `norm_topk_prob`).
    """

    def __init__(self, experts: int, hidden: int, ffn: int, k: int, shared: bool = False):
        super().__init__()
        self.k = k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, ffn)
        self.shared_experts = SharedExpert(hidden, ffn) if shared else None

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (tokens, hidden)
        probabilities = self.router(tokens).float().softmax(-1)
        weights, chosen = probabilities.topk(self.k)  # (tokens, k) each
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        result = torch.zeros_like(tokens)
        for number in range(self.router.out_features):
            token, place = torch.where(chosen == number)
            output = gated_mlp(tokens[token], self.experts.gate_up[number],
                               self.experts.down[number])
            result = result.index_add(0, token, weights[token, place, None] * output)
        result = result.view_as(x)
        shared = self.shared_experts
        return result if shared is None else result + shared(x)


class MixtureBlock(nn.Module):
    """Attention, then experts, each with a norm before it."""

    def __init__(self, hidden: int, heads: int, layer: ExpertLayer):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp, self.heads = layer, heads

    def forward(self, x):
        # (batch, heads, length, hidden / heads) each
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Mixture(nn.Module):
    """A decoder over bytes with experts in every layer.

    forward(input_ids) takes tokens of shape (batch, sequence), at most `context` long; the loss is
    the mean over the bytes that follow. `layers[i].mlp` is an ExpertLayer.
    """

    def __init__(self, layers: int = 2, hidden: int = 32, experts: int = 8, ffn: int = 32,
                 k: int = 2, shared: bool = False, heads: int = 4, context: int = 64,
                 seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.places = nn.Embedding(context, hidden)
        self.layers = nn.ModuleList(
            MixtureBlock(hidden, heads, ExpertLayer(experts, hidden, ffn, k, shared))
            for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids, labels=None):
        hidden = self.embedding(input_ids) + self.places.weight[:input_ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        # Position i predicts token i + 1: the last logits and the first token have no partner.
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return ModelOutput(logits, loss)
