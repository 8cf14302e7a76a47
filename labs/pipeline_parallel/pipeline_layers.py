"""What the script pipeline.py gives to the student: its layers and its loss. The check of 7.27
trains them in one process. Kept equal to the script by tests/pipeline_parallel/test_pipeline.py."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CONTEXT, HIDDEN = 64, 64  # tokens of a sample; width


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)

    def forward(self, tokens):  # (batch, CONTEXT) -> (batch, CONTEXT, hidden)
        return self.tokens(tokens) + self.places.weight


class Block(nn.TransformerEncoderLayer):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, x.device)
        return super().forward(x, src_mask=mask, is_causal=True)


def make_layers(options):  # name -> module, in the order in which they run
    torch.manual_seed(options.seed)
    blocks = {f"block_{number}": Block(HIDDEN, 4, dropout=0, batch_first=True, norm_first=True)
              for number in range(options.blocks)}
    return {"embedding": Embedding(), **blocks,
            "head": nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256))}


def loss_of(logits, tokens):
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
