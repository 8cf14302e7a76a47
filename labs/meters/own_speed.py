"""This machine's own speed: tokens per second of a small model, and FLOP/s of a large product."""

from dataclasses import dataclass

import torch

from labs.meters.metrics import Metric
from labs.meters.throughput import seconds_per_step
from labs.training import data, models
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.other_load import name_load

WIDTH = {"cpu": 512, "cuda": 8192}  # of the square matrices


@dataclass(frozen=True)
class OwnSpeed:
    """A GPT-2 of `parameters` on one rank. tokens_per_s: of the fastest step, because what disturbs
    a step makes it longer; flops_per_s: of the fastest product of two large fp32 matrices, which
    stands for a data sheet's peak. device: "cpu", of which one core is used, or "cuda"."""

    preset: Preset
    parameters: int
    tokens_per_s: float
    flops_per_s: float
    device: str

    def metrics(self) -> list[Metric]:
        """Both rates."""
        return [Metric("training a small model", self.tokens_per_s, "tokens/s"),
                Metric("a large product", self.flops_per_s, "FLOP/s")]

    def __repr__(self):
        where = "one GPU" if self.device == "cuda" else "one core"
        return (f"{where}, fp32: {self.tokens_per_s:,.0f} tokens/s with {self.parameters:,} "
                f"parameters; a large product reaches {self.flops_per_s / 1e9:,.0f} GFLOP/s")


def measure_own_speed(preset: Preset, rounds: int = 9) -> OwnSpeed:
    """Trains the preset's GPT-2 on one rank, on what the machine has, and multiplies two large
    matrices in turn with its steps."""
    name_load()
    return launch(_own_speed, preset, rounds, ranks=1, quiet=True, verify=False, hang_after=60)[0]


def _own_speed(preset, rounds) -> OwnSpeed:
    kind = devices.device().type
    torch.set_num_threads(1)  # several threads wait for each other where others use the machine
    model = models.move_to_rank(models.gpt2(preset.layers, preset.hidden, preset.heads,
                                            preset.context)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    [batch] = data.lm_batches(1, preset.batch, preset.context)
    batch = {name: values.to(devices.device()) for name, values in batch.items()}
    width = WIDTH[kind]
    one, other = torch.rand(2, width, width, device=devices.device())
    seconds = seconds_per_step({"step": lambda: _step(model, optimizer, batch),
                                "product": lambda: one @ other}, rounds)
    return OwnSpeed(
        preset, sum(parameter.numel() for parameter in model.parameters()),
        preset.batch * preset.context / min(seconds["step"]),
        # FLOP of a product of two (width, width) matrices: a multiplication and an addition each
        2 * width**3 / min(seconds["product"]), kind)


def _step(model, optimizer, batch):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
