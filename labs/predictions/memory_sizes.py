"""Bytes of the tensors in one forward pass, from the model's sizes, batch and sequence."""

from dataclasses import dataclass
from functools import cached_property

from labs.predictions.parameters import Shape, block_sizes

ATTENTIONS = ("sdpa", "eager")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Sizes:
    """b sequences of s tokens through a model of `shape`, computed in `element` bytes. A property
    is the bytes of one tensor. attention: "sdpa" or "eager". selective: the inside of
    attention is computed again in backward; checkpointed: the whole block is."""

    shape: Shape
    batch: int
    sequence: int
    element: int
    attention: str = "sdpa"
    device: str = "cpu"
    selective: bool = False
    checkpointed: bool = False

    @cached_property
    def fused(self) -> bool:
        """Whether scores are never written out. SDPA on CPU falls back to plain matrix products
        when there is dropout (ATen, transformers/attention.cpp: sdp_utils_cpp)."""
        return self.attention == "sdpa" and not (self.device == "cpu" and self.attention_dropout)

    @cached_property
    def cached(self) -> bool:
        """Whether forward fills a key-value cache, as Hugging Face does by default, in training
        too: a copy of keys and values that lives until the output is dropped."""
        return self.shape.use_cache and not self.checkpointed

    @cached_property
    def attention_dropout(self) -> float:
        return self.shape.dropout[1]

    @cached_property
    def softmax_upcast(self) -> bool:
        """Llama's eager attention takes its softmax in fp32; GPT-2's does not."""
        return (self.attention == "eager" and self.shape.family != "gpt2"
                and self.element < 4)

    @cached_property
    def scores_element(self) -> int:
        """Bytes of one score: plain SDPA computes in fp32."""
        return 4 if self.attention == "sdpa" else self.element

    @cached_property
    def block_sizes(self) -> dict:
        """Elements of each of a block's parameters."""
        return block_sizes(self.shape)

    @cached_property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @cached_property
    def x(self) -> int:
        """The residual stream, b·s·h."""
        return self.tokens * self.shape.hidden * self.element

    @cached_property
    def x32(self) -> int:
        """The residual stream in fp32, as RMSNorm computes."""
        return self.tokens * self.shape.hidden * 4

    @cached_property
    def q(self) -> int:
        """Queries, all heads."""
        return self.tokens * self.shape.query * self.element

    @cached_property
    def k(self) -> int:
        """Keys, all key heads; values are as large."""
        return self.tokens * self.shape.key * self.element

    @cached_property
    def f(self) -> int:
        """The width of the feed-forward part."""
        return self.tokens * self.shape.ffn * self.element

    @cached_property
    def factors(self) -> tuple:
        """Queries, keys and values as matrix products save them: copied head by head, keys repeated
        for all query heads, in fp32 where SDPA does it. Of a single sequence views are enough: one
        key head is not repeated, and a view into GPT-2's "qkv" holds on to all of it: eager
        queries, unless keys and values are views too, and the values of plain SDPA, unless they
        are in a cache."""
        core = self.scores_element // self.element
        if self.batch > 1 or core > 1:
            return self.q * core, self.q * core, self.q * core
        if self.shape.family == "gpt2" and self.attention == "eager" and self.shape.use_cache:
            return 3 * self.q, self.q, self.q
        if self.shape.family == "gpt2" and self.attention == "sdpa" and not self.shape.use_cache:
            return self.q, self.q, 3 * self.q
        keys = self.k if self.shape.kv_heads == 1 else self.q
        return self.q, keys, keys

    @cached_property
    def scores(self) -> int:
        """Attention scores, b·a·s·s."""
        return self.batch * self.shape.heads * self.sequence**2 * self.scores_element

    @cached_property
    def scores32(self) -> int:
        """Attention scores in fp32."""
        return self.batch * self.shape.heads * self.sequence**2 * 4

    @cached_property
    def mask(self) -> int:
        """The causal mask that eager attention adds, b·1·s·s."""
        return self.batch * self.sequence**2 * self.element

    @cached_property
    def lse(self) -> int:
        """Log-sum-exp of each query's scores, fp32: what fused attention saves in their place."""
        return self.tokens * self.shape.heads * 4

    @cached_property
    def stat(self) -> int:
        """RMSNorm's statistic, fp32."""
        return self.tokens * 4

    @cached_property
    def layernorm_stat(self) -> int:
        """One of LayerNorm's two statistics; the CPU keeps them in the input's type."""
        return self.tokens * (self.element if self.device == "cpu" else 4)

    @cached_property
    def rotary(self) -> int:
        """Cosines (sines are as large), shared by all layers: 1·s·d."""
        return self.sequence * self.shape.head_dim * self.element

    @cached_property
    def logits(self) -> int:
        """Logits as the head computes them."""
        return self.tokens * self.shape.vocabulary * self.element

    @cached_property
    def logits32(self) -> int:
        """Logits in fp32, as the loss needs them (transformers, loss/loss_utils.py)."""
        return self.tokens * self.shape.vocabulary * 4

    @cached_property
    def dropped_scores(self) -> int:
        """The dropout mask of the scores."""
        return self.dropped(self.scores) if self.device == "cpu" else self.scores32 // 4

    @cached_property
    def drawn_scores(self) -> int:
        """What drawing it takes for a moment."""
        return self.scores32 if self.device == "cpu" else 0

    def constants(self, number: int) -> int:
        """Python numbers that a tensor is multiplied by are saved as fp64 on the CPU."""
        return 8 * number if self.device == "cpu" else 0

    @cached_property
    def labels(self) -> int:
        """Shifted labels, int64; of a single sequence a view of the padded ones is enough."""
        return 8 * (self.tokens + (1 if self.batch == 1 else 0))

    def dropped(self, size: int) -> int:
        """The mask that dropout saves for a tensor of `size` bytes: the CPU keeps a factor of the
        tensor's type for each element, CUDA a boolean."""
        return size if self.device == "cpu" else size // self.element

    def drawn(self, size: int) -> int:
        """What drawing a dropout mask takes for a moment: on the CPU one int32 for each element
        (ATen, native/cpu/DistributionTemplates.h)."""
        return size // self.element * 4 if self.device == "cpu" else 0


def check(attention: str, device: str, batch: int, sequence: int):
    """Raises ValueError in one sentence where an argument is none."""
    if attention not in ATTENTIONS:
        raise ValueError(f"no attention {attention!r}: choose {' or '.join(ATTENTIONS)}")
    if device not in DEVICES:
        raise ValueError(f"no device {device!r}: choose {' or '.join(DEVICES)}")
    if batch < 1 or sequence < 1:
        raise ValueError(f"batch={batch}, sequence={sequence}: both must be at least 1")
