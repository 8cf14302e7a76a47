"""The operators that are said to allocate their results alone, under the allocator's events; and
what a probe finds of those that take more."""

import pytest
import torch

from labs.predictions.dryrun import probe
from labs.predictions.dryrun.operators import allocates_results_only

aten = torch.ops.aten
SCALARS = 64  # bytes: numbers that an operator wraps in tensors, and sums of threads
TYPES = (torch.float32, torch.bfloat16)


def took(func, *args, threads=2) -> int:
    """Scratch bytes of a real call."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return probe._measured(func, args, {}).scratch
    finally:
        torch.set_num_threads(before)


def pointwise():
    """torch's pointwise operators on one tensor, or on two."""
    for name in sorted(dir(aten)):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            func = getattr(packet, overload)
            required = [str(a.type) for a in func._schema.arguments if not a.has_default_value()]
            if torch.Tag.pointwise in func.tags and required in (["Tensor"], ["Tensor", "Tensor"]):
                yield func, len(required)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_pointwise_operators(dtype):
    tried = 0
    x, y = (torch.rand(120, 301).to(dtype) for _ in range(2))
    for func, count in pointwise():
        args = (x.clone(), y.clone())[:count]
        if allocates_results_only(func, args, {}):
            try:
                scratch = took(func, *args)
            except (RuntimeError, NotImplementedError):
                continue  # not of this type
            assert scratch <= SCALARS, func
            tried += 1
    assert tried > 100


def listed(dtype, rows):
    """(operator, arguments) of the others."""
    x, w = torch.rand(rows, 96).to(dtype), torch.rand(96, 160).to(dtype)
    logits, labels = torch.rand(rows, 211).to(dtype), torch.zeros(rows, dtype=torch.int64)
    batch, ids = torch.rand(4, rows, 32).to(dtype), torch.zeros(2, rows, dtype=torch.int64)
    total = torch.ones(())
    yield aten.mm.default, (x, w)
    yield aten.mm.default, (x, w.t().contiguous().t())
    yield aten.addmm.default, (torch.rand(160).to(dtype), x, w)
    yield aten.bmm.default, (batch, batch.transpose(1, 2))
    yield aten._softmax.default, (logits, -1, False)
    yield aten._softmax_backward_data.default, (logits, logits, -1, dtype)
    yield aten._log_softmax.default, (logits, 1, False)
    yield aten._log_softmax_backward_data.default, (logits, logits, 1, dtype)
    yield aten.nll_loss_forward.default, (logits, labels, None, 1, -100)
    yield aten.nll_loss_backward.default, (total.to(dtype), logits, labels, None, 1, -100,
                                           total.to(dtype))
    yield aten.embedding.default, (w, ids)
    yield aten.embedding_dense_backward.default, (torch.rand(2, rows, 96).to(dtype), ids, 50, -1,
                                                  False)
    yield aten.native_layer_norm.default, (x, [96], x[0].clone(), x[1].clone(), 1e-5)
    yield aten.gelu.default, (x,)
    yield aten.gelu_backward.default, (x, x)
    yield aten.cat.default, ([x, x], 1)
    yield aten.stack.default, ([x, x],)
    yield aten.sum.dim_IntList, (x, [0], True)
    yield aten.sum.dim_IntList, (x, [1])
    yield aten.mean.dim, (x, [-1], True)
    yield aten.amax.default, (x, [-1])
    yield aten.linalg_vector_norm.default, (x, 2.0)
    yield aten.constant_pad_nd.default, (x, [0, 1], 0.0)
    yield aten.gather.default, (x, 1, torch.zeros(rows, 5, dtype=torch.int64))
    yield aten.index.Tensor, (x, [labels])
    yield aten.select_backward.default, (x[0].contiguous(), [rows, 96], 0, 3)
    yield aten.slice_backward.default, (x, [rows, 200], 1, 0, 96, 1)
    yield aten.tril.default, (x,)
    yield aten.clone.default, (x.t(),)
    yield aten._to_copy.default, (x,)
    yield aten.copy_.default, (torch.rand(96, rows), x.t())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [7, 640])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_listed_operators(dtype, rows, threads):
    found = [(func, took(func, *args, threads=threads)) for func, args in listed(dtype, rows)
             if allocates_results_only(func, args, {})]
    assert [(func, scratch) for func, scratch in found if scratch > SCALARS] == []
    assert len(found) > 20


@pytest.mark.parametrize("func, args", [
    (aten.mm.default, (torch.rand(64, 64).bfloat16(), torch.rand(64, 64).bfloat16())),
    (aten.convolution.default, (torch.rand(2, 3, 16, 16), torch.rand(8, 3, 3, 3), None, [1, 1],
                                [1, 1], [1, 1], False, [0, 0], 1)),
    (aten.mul.Tensor, (torch.rand(64), torch.rand(64, dtype=torch.float64))),
    (aten.cumsum.default, (torch.rand(64, 64), 0)),
    (aten._softmax.default, (torch.rand(64, 64).t(), -1, False))])
def test_others_are_tried(func, args):
    assert not allocates_results_only(func, args, {})


def test_an_operator_that_is_too_large_is_named(monkeypatch):
    from labs.predictions.dryrun import dry_run

    monkeypatch.setattr(probe, "MOST_BYTES", 1000)
    monkeypatch.setattr(probe, "_PROBED", {})

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.Conv1d(4, 4, 3)

        def forward(self, x):
            return type("Output", (), {"loss": self.convolution(x).square().mean()})

    run = dry_run(Model, inputs=lambda: {"x": torch.zeros(4, 4, 64)})
    assert set(run.untried) == {"aten.convolution.default", "aten.convolution_backward.default"}
    assert "not exact: the scratch space of aten.convolution.default" in repr(run)
