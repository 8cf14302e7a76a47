"""Models of many kinds, small enough to run: what the dry run must predict or refuse."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

SMALL = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DECODER = dict(SMALL, hidden_size=96, intermediate_size=256, num_attention_heads=4,
               num_key_value_heads=2, num_hidden_layers=3)
ENCODER = dict(SMALL, hidden_size=96, intermediate_size=256, num_attention_heads=4,
               num_hidden_layers=2, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


@dataclass
class Output:
    """A dataclass, as DDP wants it that looks for unused parameters."""

    loss: torch.Tensor


class WithLoss(nn.Module):
    """Any module, with the mean square of its output (of the first, if it has several) as loss."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        output = self.module(*inputs.values())
        while isinstance(output, tuple | list):
            output = output[0]
        return Output(output.float().square().mean())


def of_module(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A function that makes the module with a loss."""
    return lambda: WithLoss(make())


def of_config(kind: str, auto: str = "AutoModelForCausalLM", **sizes) -> Callable[[], nn.Module]:
    """A function that makes a Hugging Face model from a configuration's class and sizes."""
    def make():
        import transformers

        config = getattr(transformers, kind)(**sizes)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return getattr(transformers, auto).from_config(config)
    return make


def tokens(batch: int = 2, sequence: int = 64, **more) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that makes a batch of tokens and labels, and of `more` zeros: name -> shape."""
    def make():
        ids = torch.zeros(batch, sequence, dtype=torch.int64)
        extra = {name: torch.zeros(shape) for name, shape in more.items()}
        return {"input_ids": ids, "labels": ids.clone(), **extra}
    return make


def floats(*shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that makes a batch of one float tensor, `x`."""
    return lambda: {"x": torch.zeros(shape)}


def integers(*shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that makes a batch of one tensor of token numbers, `x`."""
    return lambda: {"x": torch.zeros(shape, dtype=torch.int64)}


class Recurrent(nn.Module):
    """A language model around a recurrent layer of torch's."""

    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(96, 256)
        self.layer = kind(64, 96, 2, batch_first=True, **options)

    def forward(self, input_ids, labels):
        logits = self.head(self.layer(self.embedding(input_ids))[0][..., :96])
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class ResNet(nn.Module):
    """Two residual blocks of convolutions with a norm and a pooled head."""

    def __init__(self, norm=nn.BatchNorm2d, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm, self.pool = norm(width), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.ModuleList(nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.stem(x))))
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Convolutions down, transposed ones up, group norm between."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.out = nn.Conv2d(19, 3, 1)

    def forward(self, x):
        return self.out(torch.cat([self.up(self.down(x)), x], 1))


class Spectral(nn.Module):
    """Mixes tokens by a Fourier transform, as FNet."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(torch.fft.fft2(self.linear(x)).real)


class Selecting(nn.Module):
    """Sorts, cumulates, gathers, scatters and picks: what sparse attention and top-k losses do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        x = self.linear(x)
        ordered, index = x.sort(-1)
        top, where = x.topk(8, -1)
        scattered = torch.zeros_like(x).scatter(-1, where, top)
        summed = torch.zeros_like(x).scatter_add(-1, index, ordered.cumsum(-1))
        picked = torch.einsum("bsh,bth->bst", scattered, summed)
        return picked.logcumsumexp(-1) + x.index_select(1, torch.arange(x.shape[1])).mean(-1, True)


class Convolved(nn.Module):
    """A Whisper-like front end: two convolutions over time, then attention."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(20, 64, 3, padding=1)
        self.second = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.attend = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = F.gelu(self.second(F.gelu(self.first(x)))).transpose(1, 2)
        return self.attend(x, x, x, need_weights=False)


class Bagged(nn.Module):
    """A click model: bags of embeddings, then a perceptron."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(1000, 32, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.BatchNorm1d(64),
                                 nn.Linear(64, 1))

    def forward(self, x):
        return self.mlp(self.bag(x))


class Adversarial(nn.Module):
    """A generator and a critic in one module; the loss is of both."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 48))
        self.critic = nn.Sequential(nn.Linear(48, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        made = self.generator(x)
        return F.softplus(-self.critic(made)) + F.softplus(self.critic(made.detach()))


class MixtureOfExperts(nn.Module):
    """Top-1 routing by nonzero: how many tokens an expert gets depends on the numbers."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        choice, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Tied(nn.Module):
    """One layer used three times, an unused one, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.shared, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
        self.frozen, self.last = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.shared(x))
        return self.last(self.frozen(x))


class Jamming(nn.Module):
    """A decoder layer of torch's own, which copies its layers deeply."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023): one moment, updates by sign."""

    def __init__(self, parameters, lr=1e-4):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_((0.9 * moment + 0.1 * p.grad).sign_(), alpha=-group["lr"])
                moment.mul_(0.99).add_(p.grad, alpha=0.01)


def mlp() -> nn.Module:
    """A perceptron of four layers, the third wider."""
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 512), nn.GELU(),
                         nn.Linear(512, 128), nn.LayerNorm(128), nn.Linear(128, 8))
