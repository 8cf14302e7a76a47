"""What a Llama layer keeps for backward: the formula of notebook 07a against the memory meter."""

import sys

import cloudpickle
import pytest
import torch
from _build.definitions import definitions

from labs.tensor_parallel import layer_records
from labs.tensor_parallel.kept_activations import predicted, saved_by_part, whole_layer
from labs.tensor_parallel.kept_memory import StorageRef
from labs.training import hf_configs, models
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
right = definitions("07a_tensor_parallel")
RANKS = 4


@pytest.mark.usefixtures("warm_launcher")
def test_the_formula_is_what_the_memory_meter_finds():
    strategies = [layer_records.whole, right.tensor_parallel, right.sequence_parallel]
    found = launch(layer_records.layer_memory, strategies, ranks=RANKS, quiet=True,
                   device="cpu")[0]
    config = models.llama(1, **layer_records.SIZES).config
    said = list(predicted(config, RANKS).values())
    for measured, formula in zip(found, said, strict=False):
        assert measured.total / layer_records.unit_bytes() == pytest.approx(formula.total, rel=0.01)
    assert whole_layer(config) == said[0]


def test_llama_3_8b_keeps_45_bytes_of_sbh():
    # Notebook 07a: 6 + 16.5 numbers, and 773 GB for 131,072 tokens in 32 layers.
    kept = whole_layer(hf_configs.config("Llama-3-8B"))
    assert round(kept.norms + kept.inputs, 2) == 6.0 and round(kept.inside, 1) == 16.5
    assert round(2 * kept.total * 131_072 * 4096 * 32 / 1e9) == 773


def test_what_is_saved_is_freed_without_a_backward():
    model, saved = models.llama(1, **layer_records.SIZES), []

    def save_an_output(module, inputs, output):  # exp saves its own output
        saved.append(StorageRef(output.exp()))

    model.model.layers[0].mlp.act_fn.register_forward_hook(save_an_output)
    with saved_by_part(model):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert saved and not any(each.is_alive() for each in saved)
