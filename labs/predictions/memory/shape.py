"""The sizes of a decoder, from which `parameters` counts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. heads: query heads; positions: the learned ones (0 with rotary
    embedding); tied: the head's matrix is the embedding's; *_bias: whether the matrices of queries,
    keys and values, of attention's output and of the feed-forward part have biases.

    mlp_matrices: of the feed-forward part, 3 where it is gated, otherwise 2. norms: of the hidden
    width in a block. norm_bias: whether a norm has a bias beside its weight. Left at None, both are
    as in GPT-2 (2, True) for the family "gpt2", and as in Llama (3, False) for all others. qk_norm:
    parameters of the norms of queries and keys in a block. head_bias: of vocabulary elements.

    experts: in a block, of which a token uses active_experts; each is expert_ffn wide (0 experts: a
    dense model). dense_blocks: indices of the blocks without experts; they are ffn wide.
    shared_ffn: width of the experts that every token uses, in each block with experts.
    latent: (inputs, outputs) of attention's matrices where they are not those of queries, keys,
    values and output, as in multi-head latent attention; head_dim is then the mean width of a key
    and a value, and qk_norm has all of attention's other parameters.
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int = 0
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    mlp_matrices: int | None = None
    norms: int = 2
    norm_bias: bool | None = None
    qk_norm: int = 0
    head_bias: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    dense_blocks: tuple[int, ...] = ()
    shared_ffn: int = 0
    latent: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        is_gpt2 = self.family == "gpt2"
        if self.mlp_matrices is None:
            object.__setattr__(self, "mlp_matrices", 2 if is_gpt2 else 3)
        if self.norm_bias is None:
            object.__setattr__(self, "norm_bias", is_gpt2)

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads together; values are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def is_mixture(self) -> bool:
        """Whether there is a block with experts."""
        return self.experts > 0 and len(self.dense_blocks) < self.layers

    @property
    def router(self) -> int:
        """Parameters of a block's router, a matrix of hidden x experts; 0 in a dense model."""
        return self.hidden * self.experts * self.is_mixture

    @property
    def active_ffn(self) -> int:
        """Width of the feed-forward part that one token uses: its experts' widths together."""
        if not self.is_mixture:
            return self.ffn
        return self.active_experts * self.expert_ffn + self.shared_ffn
