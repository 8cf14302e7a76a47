"""Jobs of many kinds: predicted to within the bytes of a few numbers, or refused with a reason."""

import pytest
import torch
from _bench import kinds, memory_events
from _bench.memory_kinds import KINDS
from torch import nn

from labs.predictions.dryrun import dry_run

PREDICTED = (
    "LSTM", "GRU", "ResNet, channels last", "convolutions over time", "sort, scan, scatter", "ViT",
    "Mixtral", "Adafactor", "two optimizers", "transformer of torch", "the workbook's ddp",
    "the workbook's fsdp2", "DDP, static graph", "DDP, unused", "DDP, accumulation, no sync",
    "FSDP2, reshard to 2 of 4", "FSDP2, accumulation, no sync")


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", PREDICTED)
def test_predicted(name, warm_launcher):
    # static_graph and its kind keep a few numbers for each parameter
    predicted = pytest.approx(kinds.predicted(KINDS[name]), rel=1e-4, abs=400)
    assert memory_events.on_ranks(KINDS[name]) == predicted


@pytest.mark.parametrize("name, words", [
    ("experts by nonzero", r"nonzero.*memory_models.py line \d+: rows ="),
    ("looks at a number", r"_local_scalar_dense.*line \d+: return y if y.mean"),
    ("compiled", "compiled"), ("LBFGS", "looks at the numbers"),
    ("DDP, edge cases", "'sometimes_unused.weight' got no gradient.*find_unused_parameters=True"),
    ("DDP, fp16 gradients", "hook fp16_compress_hook waits for other ranks")])
def test_refused(name, words):
    with pytest.raises(RuntimeError, match=words):
        kinds.predicted(KINDS[name])


def test_a_configuration_of_no_decoder_is_refused():
    from transformers import ViTConfig

    with pytest.raises(ValueError, match="ViTConfig is no decoder's: give a function"):
        dry_run(ViTConfig())


class Reading(nn.Module):
    """Reads numbers that no parameter and no chance decides: a rate for each layer, and a mask."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.linear(x)
        if not mask.all():
            x = torch.tanh(x) * mask.unsqueeze(-1)
        return type("Output", (), {"loss": x.square().mean()})


def test_numbers_that_are_known():
    def forward(mask):
        run = dry_run(Reading, inputs=lambda: {"x": torch.zeros(4, 6, 8), "mask": mask()})
        return run.peaks["forward"].total

    masked = forward(lambda: torch.ones(4, 6).tril())
    assert masked > forward(lambda: torch.ones(4, 6))
