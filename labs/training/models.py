"""Models built from scratch: real transformers for measuring, small ones, on the rank's device, for
exact checks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from labs.workers import devices

VOCABULARY = 256  # the data is bytes


def gpt2(layers: int = 4, hidden: int = 128, heads: int = 4, context: int = 64,
         seed: int = 0) -> nn.Module:
    """Returns a GPT-2 of Hugging Face's classes with random weights, over bytes."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(gpt2_config(layers, hidden, heads, context))
    model.loss_type = "ForCausalLM"  # the default; left unset, transformers warns on every rank
    return model


def gpt2_config(layers: int, hidden: int, heads: int, context: int) -> Any:
    """Returns the GPT2Config of `gpt2`. It has no dropout, so that ranks and repeated runs compute
    the same numbers."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCABULARY, n_positions=context, n_embd=hidden, n_layer=layers, n_head=heads,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
        bos_token_id=None, eos_token_id=None)


def llama(layers: int = 4, hidden: int = 128, heads: int = 8, kv_heads: int = 4,
          context: int = 64, intermediate: int | None = None, tied: bool = False,
          vocabulary: int = VOCABULARY, bias: bool = False, seed: int = 0) -> nn.Module:
    """Returns a Llama of Hugging Face's classes with random weights, over bytes: `heads` query
    heads share `kv_heads` key and value heads; the MLP is gated and `intermediate` wide (None:
    3.5 · hidden, as in Llama-3-8B). tied: embedding and head are one parameter. bias: the linear
    layers of attention and MLP have biases, drawn at random: a zero that is added twice does not
    show. 2 and 4 ranks divide all default sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=context, hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=intermediate or hidden * 7 // 2, tie_word_embeddings=tied,
        attention_bias=bias, mlp_bias=bias, attention_dropout=0.0, use_cache=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None))
    model.loss_type = "ForCausalLM"
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter, std=0.02)
    return model


def move_to_rank(model: nn.Module) -> nn.Module:
    """Moves a model to this rank's device, and returns it; one on "meta" stays there, as one of a
    dry run's fake tensors does. It was drawn on the CPU, so it has the same numbers on every
    device."""
    first = next(model.parameters(), None)
    stays = first is None or first.is_meta or isinstance(first, FakeTensor)
    return model if stays else model.to(devices.device())


@dataclass
class ModelOutput:
    """What a model of this file returns."""

    logits: torch.Tensor
    loss: torch.Tensor


# fully_shard looks for tensors in what the root returns, as a pytree, and begins its backward with
# their gradients: in an object that is not registered it finds none, and then averages no gradients
# of the root, without a word.
register_pytree_node(ModelOutput, lambda output: ([output.logits, output.loss], None),
                     lambda values, _: ModelOutput(*values))


class EdgeCaseModel(nn.Module):
    """A small model with every property that breaks a careless data-parallel wrapper.

    Tied weights (embedding and head), a frozen parameter (scale), a buffer (shift), a prime number
    of trainable parameters (1597), and a layer (`sometimes_unused`) that runs only with use_all.
    forward(x, y, use_all) takes bytes x, y of shape (batch, sequence); the loss is the mean over
    all positions.
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.first = nn.Linear(5, 13)
        self.sometimes_unused = nn.Linear(13, 13, bias=False)
        self.second = nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.rand(5) + 0.5, requires_grad=False)
        self.register_buffer("shift", torch.randn(5))
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        # One parameter under two names: a wrapper that lists it twice reduces it twice.
        self.head.weight = self.embedding.weight
        move_to_rank(self)

    def forward(self, x, y, use_all: bool = False):
        # hidden: (batch, sequence, 13)
        hidden = torch.tanh(self.first(self.embedding(x) * self.scale + self.shift))
        if use_all:
            hidden = hidden + torch.tanh(self.sometimes_unused(hidden))
        # logits: (batch, sequence, 256); y: (batch, sequence)
        logits = self.head(self.second(hidden))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return ModelOutput(logits, loss)


def blocks(model: nn.Module) -> nn.ModuleList:
    """The model's repeated layers: the nn.ModuleList that holds most parameters; empty if none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()),
               default=nn.ModuleList())


class DeepMLP(nn.Module):
    """Many equal layers with a residual connection, so that one layer is a small part of the model.

    forward(x, y) takes bytes of shape (batch, context) and predicts y from x as numbers. A layer
    has width² + width parameters, which few world sizes divide; outside the layers there are
    (2·context + 1)·width + context more. Activations are small: almost all memory is parameters,
    gradients and optimizer state.
    """

    def __init__(self, layers: int = 12, width: int = 37, seed: int = 0, context: int = 8):
        super().__init__()
        torch.manual_seed(seed)
        self.inlet, self.outlet = nn.Linear(context, width), nn.Linear(width, context)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        move_to_rank(self)

    def forward(self, x, y):
        # (batch, width); bytes become numbers from 0 to 1
        hidden = self.inlet(x / 255)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        predicted = self.outlet(hidden)
        return ModelOutput(predicted, F.mse_loss(predicted, y / 255))


class Decoder(nn.Module):
    """A small GPT over bytes, of torch's own layers and with dropout. It needs no transformers,
    whose import takes a rank as long as torch's.

    forward(input_ids) takes tokens of shape (batch, sequence), at most `context` long; the loss is
    the mean over the bytes that follow.
    """

    def __init__(self, layers: int = 2, hidden: int = 64, dropout: float = 0.0, seed: int = 0,
                 heads: int = 4, context: int = 64):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.places = nn.Embedding(context, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout, "gelu", norm_first=True,
                                       batch_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        # (length, length): -inf above the diagonal, so that no token sees a later one
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        # (batch, length, hidden)
        hidden = self.embedding(input_ids) + self.places.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(hidden))
        # Position i predicts token i + 1: the last logits and the first token have no partner.
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return ModelOutput(logits, loss)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    # not by isinstance: who has no DTensor need not import it
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of the parameters that get gradients; a tied one once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def count_trainable(model: nn.Module) -> int:
    """The number of trainable parameters of a model, in elements; a tied one counts once."""
    return sum(parameter.numel() for _, parameter in trainable(model))
