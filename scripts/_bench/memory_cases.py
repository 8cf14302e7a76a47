"""The grid of the memory bench: training jobs small enough to run, and unlike one another."""

from dataclasses import dataclass

from labs.predictions.dryrun.jobs import DryRunJob

# Sizes of each family take turns, so that every strategy meets several.
SIZES = {
    "deep": dict(layers=6, hidden=128, heads=4, kv=2, ffn=352, vocabulary=1024),
    "wide": dict(layers=3, hidden=256, heads=8, kv=4, ffn=688, vocabulary=8192),
    "odd": dict(layers=5, hidden=150, heads=5, kv=1, ffn=410, vocabulary=3001, dropout=0.1),
}
LARGE = {
    "deep": dict(layers=24, hidden=1024, heads=16, kv=4, ffn=2816, vocabulary=32000),
    "wide": dict(layers=8, hidden=2048, heads=16, kv=8, ffn=5632, vocabulary=50257),
    "odd": dict(layers=11, hidden=1600, heads=25, kv=5, ffn=4300, vocabulary=32003, dropout=0.1),
}
_NO_TOKENS = dict(bos_token_id=None, eos_token_id=None, use_cache=False)


def gpt2(*, layers, hidden, heads, vocabulary, dropout=0.0, kv=None, ffn=None):
    """GPT-2's configuration; it has neither key heads of its own nor another width."""
    from transformers import GPT2Config

    return GPT2Config(**_NO_TOKENS, n_layer=layers, n_embd=hidden, n_head=heads,
                      vocab_size=vocabulary, n_positions=1024, embd_pdrop=dropout,
                      attn_pdrop=dropout, resid_pdrop=dropout)


def llama(**sizes):
    """Llama's: grouped-query attention, a head of its own."""
    from transformers import LlamaConfig

    return _gated(LlamaConfig, tied=False, **sizes)


def qwen2(**sizes):
    """Qwen2's: grouped-query attention, biases, embedding and head tied."""
    from transformers import Qwen2Config

    return _gated(Qwen2Config, tied=True, **sizes)


def _gated(cls, *, layers, hidden, heads, kv, ffn, vocabulary, tied, dropout=0.0):
    return cls(**_NO_TOKENS, num_hidden_layers=layers, hidden_size=hidden,
               num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=ffn,
               vocab_size=vocabulary, tie_word_embeddings=tied, pad_token_id=None)


FAMILIES = {"GPT-2": gpt2, "Llama": llama, "Qwen2": qwen2}


@dataclass(frozen=True)
class Case:
    """One training job: batch counts sequences per rank, sequence counts tokens. reshard: FSDP2
    frees a block's parameters between forward and backward; view: DDP's gradients are views of
    its buckets."""

    family: str
    size: str
    strategy: str
    ranks: int
    batch: int
    sequence: int
    precision: str = "fp32"
    checkpointing: str = "none"
    reshard: bool = True
    view: bool = False
    large: bool = False

    @property
    def name(self) -> str:
        """What the table calls it, and --only looks for."""
        words = [f"{self.family} {self.size}", self.strategy + f"-{self.ranks}" * (self.ranks > 1),
                 f"{self.batch}x{self.sequence}", self.precision]
        words += ["checkpointed"] * (self.checkpointing == "full")
        words += ["kept"] * (not self.reshard) + ["views"] * self.view
        return " ".join(words)

    @property
    def config(self):
        """Its Hugging Face configuration."""
        sizes = (LARGE if self.large else SIZES)[self.size]
        return FAMILIES[self.family](**sizes)

    @property
    def options(self) -> dict:
        """What the wrapper is told."""
        if self.strategy == "ddp":
            return {"gradient_as_bucket_view": self.view}
        return {"reshard_after_forward": self.reshard} if self.strategy == "fsdp2" else {}

    @property
    def job(self) -> DryRunJob:
        """The same for labs.predictions.dryrun, which also builds it on real ranks."""
        return DryRunJob(self.config, self.ranks, self.strategy, self.batch, self.sequence,
                   self.precision, self.checkpointing, options=self.options)


# On the CPU: real ranks, through gloo. "mixed" is FSDP2's policy: bf16 parameters, fp32 reduction.
JOBS = (
    dict(strategy="plain", ranks=1, batch=4, sequence=64),
    dict(strategy="plain", ranks=1, batch=1, sequence=512),
    dict(strategy="plain", ranks=1, batch=8, sequence=128, checkpointing="full"),
    dict(strategy="plain", ranks=1, batch=4, sequence=160, precision="bf16"),
    dict(strategy="ddp", ranks=2, batch=4, sequence=64),
    dict(strategy="ddp", ranks=2, batch=4, sequence=128, view=True),
    dict(strategy="ddp", ranks=4, batch=2, sequence=200, checkpointing="full"),
    dict(strategy="fsdp2", ranks=2, batch=4, sequence=128),
    dict(strategy="fsdp2", ranks=2, batch=1, sequence=48, reshard=False),
    dict(strategy="fsdp2", ranks=4, batch=4, sequence=96, checkpointing="full"),
    dict(strategy="fsdp2", ranks=4, batch=2, sequence=256, reshard=False),
    dict(strategy="fsdp2", ranks=2, batch=4, sequence=128, precision="mixed"),
    dict(strategy="fsdp2", ranks=4, batch=2, sequence=64, precision="mixed"),
    dict(strategy="fsdp2", ranks=4, batch=4, sequence=256, precision="mixed",
         checkpointing="full", reshard=False),
)

# On one GPU: one rank, or rank 0 of eight whose other ranks are not there.
GPU_JOBS = (
    dict(strategy="plain", ranks=1, batch=4, sequence=512),
    dict(strategy="plain", ranks=1, batch=2, sequence=1024, precision="bf16"),
    dict(strategy="plain", ranks=1, batch=8, sequence=1024, checkpointing="full"),
    dict(strategy="ddp", ranks=8, batch=4, sequence=512),
    dict(strategy="fsdp2", ranks=8, batch=4, sequence=512),
    dict(strategy="fsdp2", ranks=8, batch=2, sequence=1024, reshard=False),
    dict(strategy="fsdp2", ranks=8, batch=4, sequence=1024, precision="mixed"),
    dict(strategy="fsdp2", ranks=8, batch=8, sequence=1024, precision="mixed",
         checkpointing="full"),
)


def grid(large: bool = False) -> list:
    """Every job of every family, each in one of the sizes; large: those for a GPU."""
    jobs = GPU_JOBS if large else JOBS
    return [Case(family, list(SIZES)[(row + column) % len(SIZES)], large=large, **job)
            for row, family in enumerate(FAMILIES) for column, job in enumerate(jobs)]


def chosen(cases, only=(), ranks=None, count=None) -> list:
    """The part of a grid whose names contain one of `only`, on these numbers of ranks, and of that
    `count` cases spread evenly."""
    cases = [case for case in cases
             if (not only or any(part.lower() in case.name.lower() for part in only))
             and (not ranks or case.ranks in ranks)]
    if count is None or count >= len(cases):
        return cases
    return [cases[index * len(cases) // count] for index in range(count)]
