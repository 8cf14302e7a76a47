"""Where the tolerances come from: how far rounding moves the reference's own results."""

import pytest
import torch
from torch.nn import functional as F

from labs.checks import tolerances
from labs.checks.tolerances import MARGIN
from labs.fsdp import strategy_checks
from labs.sharded_muon.scaffold import newton_schulz
from labs.training import data, models
from labs.training.models import EdgeCaseModel

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


def moved(compute, tries=5, floor=1.0) -> float:
    """How far the results of compute(generator) are apart from those of compute(None), at most:
    absolute below `floor`, relative to a tensor's largest element above."""
    want = compute(None)
    return max(((a - b).abs().max() / b.abs().max().clamp_min(floor)).item()
               for seed in range(tries)
               for a, b in zip(compute(torch.Generator().manual_seed(seed)), want, strict=True))


def by_one_ulp(x, generator):
    """Each number moved to the next one above or below, by chance; as it is without a generator."""
    if generator is None:
        return x
    up = torch.rand(x.shape, generator=generator) < 0.5
    return torch.where(up, torch.nextafter(x, torch.full_like(x, torch.inf)),
                       torch.nextafter(x, torch.full_like(x, -torch.inf)))


def backward(model, batch, generator):
    """The gradient of the whole batch, or the sum over its samples in a random order."""
    count = len(next(iter(batch.values())))
    order = ([torch.arange(count)] if generator is None
             else torch.randperm(count, generator=generator).split(1))
    for chosen in order:
        loss = model(**{name: values[chosen] for name, values in batch.items()}).loss
        (loss * len(chosen) / count).backward()


def built(make, generator):
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(by_one_ulp(parameter, generator))
    return model


def gradients(make, batch):
    def compute(generator):
        model = built(make, generator)
        backward(model, batch, generator)
        return [p.grad for p in model.parameters() if p.grad is not None]
    return compute


def trained(make, make_optimizer, batches):
    def compute(generator):
        model = built(make, generator)
        optimizer = make_optimizer(model)
        for batch in batches:
            backward(model, batch, generator)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]
    return compute


def attention(tokens, scale=1.0):
    seeded = torch.Generator().manual_seed(0)
    inputs = [scale * torch.randn(1, 2, tokens, 8, generator=seeded) for _ in range(3)]

    def compute(generator):
        moved = [by_one_ulp(x, generator).clone().requires_grad_() for x in inputs]
        out = F.scaled_dot_product_attention(*moved, is_causal=True)
        out.sum().backward()
        return [out.detach(), *(x.grad for x in moved)]
    return compute


def cross_entropy(size):
    seeded = torch.Generator().manual_seed(0)
    logits = size * torch.randn(18, 48, generator=seeded)
    targets = torch.randint(48, (18,), generator=seeded)

    def compute(generator):
        x = by_one_ulp(logits, generator).clone().requires_grad_()
        loss = F.cross_entropy(x, targets)
        loss.backward()
        return [loss.detach(), x.grad]
    return compute


def orthogonalised(*shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    return lambda generator: [newton_schulz(by_one_ulp(matrix, generator))]


def edge_case():
    return EdgeCaseModel(seed=0)


def llama():
    return models.llama(seed=0)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), **ADAMW)


DERIVED = {
    "gradients of a small model": (
        lambda: moved(gradients(edge_case, data.xy_batches(1, 12)[0])), "SUMS"),
    "6 steps of a small model": (
        lambda: moved(trained(edge_case, adamw, data.xy_batches(6, 12))), "SUMS"),
    "5 steps of a Llama": (
        lambda: moved(trained(llama, adamw, data.lm_batches(5, 3, 10))), "SUMS"),
    "a loss of logits of 10,000": (lambda: moved(cross_entropy(3000.0)), "SUMS"),
    "gradients beside the largest": (
        lambda: moved(gradients(llama, data.lm_batches(1, 4, 10)[0]), floor=1e-3), "GRADIENTS"),
    "6 steps of GPT-2": (
        lambda: moved(trained(strategy_checks.make_model, strategy_checks.make_optimizer,
                              data.lm_batches(6, 4, strategy_checks.CONTEXT))), "TRAINED"),
    "attention of 1,024 tokens": (lambda: moved(attention(1024), tries=3), "ATTENTION"),
    "attention with scores of 300": (lambda: moved(attention(9, scale=6.0)), "ATTENTION"),
    "Newton-Schulz": (lambda: moved(orthogonalised(5, 5), tries=20), "NEWTON_SCHULZ"),
    "the divisor of clipping": (lambda: 1e-6 / 0.05, "NORM")}


@pytest.mark.parametrize("what", DERIVED)
def test_a_tolerance_is_a_multiple_of_what_rounding_does(what):
    measure, name = DERIVED[what]
    found = measure()
    assert 0 < MARGIN * found <= vars(tolerances)[name], (
        f"{what}: rounding moves it by {found:.2g}, and {name} is {vars(tolerances)[name]:g}")
