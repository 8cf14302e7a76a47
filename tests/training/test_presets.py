"""The sizes of the presets are what the comment above them says."""

import pytest
import torch

from labs.checks.comparison import model_of
from labs.predictions.memory.predict import predict
from labs.training.models import count_trainable
from labs.training.presets import preset

A100 = 19.5e12  # FLOP/s of fp32, NVIDIA's data sheet of 2020
CONTEXT = 0.5e9  # bytes of a CUDA context, about
MODULES = 4  # that notebook 02 compares, and keeps while they take turns


def step_flops(chosen) -> float:
    """FLOPs of one rank's step: 6 for each parameter and token, and attention's."""
    tokens = chosen.batch * chosen.context
    return tokens * (6 * parameters(chosen) + 12 * chosen.layers * chosen.hidden * chosen.context)


def parameters(chosen) -> int:
    with torch.device("meta"):
        return count_trainable(model_of(chosen))


def held(chosen) -> dict[str, float]:
    """Phase -> bytes of a rank under DDP."""
    with torch.device("meta"):
        config = model_of(chosen).config
    found = predict(config, batch=chosen.batch, sequence=chosen.context, ranks=chosen.ranks,
                    strategy="ddp", device="cuda")
    return {phase: memory.total for phase, memory in found.items()}


@pytest.mark.parametrize("name, gigabytes, peak, teraflops", [("one-gpu", 1.19, 1.86, 0.39),
                                                            ("node", 4.04, 5.17, 1.29)])
def test_what_a_rank_holds_and_computes(name, gigabytes, peak, teraflops):
    chosen = preset(name)
    found = held(chosen)
    assert found["step"] / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert found["step"] == pytest.approx(20 * parameters(chosen), rel=0.01)
    assert found["peak"] / 1e9 == pytest.approx(peak, rel=0.01)
    assert step_flops(chosen) / 1e12 == pytest.approx(teraflops, rel=0.02)


def test_steps_are_long_enough_to_be_timed():
    assert step_flops(preset("node")) / A100 > 0.06
    assert 2 * step_flops(preset("one-gpu")) / A100 == pytest.approx(0.04, rel=0.01)


def test_four_modules_fit():
    """All are kept, and one of them computes at a time."""
    for name, sharing, memory in (("one-gpu", 2, 15.8e9), ("node", 1, 24e9)):
        found = held(preset(name))
        needed = sharing * ((MODULES - 1) * found["step"] + found["peak"] + CONTEXT)
        assert 0.7 * memory < needed < 0.95 * memory


def test_gradients_on_two_links():
    """A tenth of the step over NVLink, as long as the step over PCIe 4."""
    chosen = preset("node")
    step, bytes_sent = step_flops(chosen) / A100, 2 * 7 / 8 * 4 * parameters(chosen)
    assert bytes_sent / 235e9 / step == pytest.approx(0.1, abs=0.02)
    assert bytes_sent / 25e9 / step == pytest.approx(0.9, abs=0.1)
