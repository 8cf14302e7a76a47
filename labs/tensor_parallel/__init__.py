"""Notebook 07a: tensor and sequence parallelism by hand, beside torch's own, and ring attention.

The names are lazy, so that a rank does not import what draws.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part A: linear layers, attention, a whole Llama
    from labs.tensor_parallel.charts.linear_layers import (
        show_all_reduces,
        show_resident_bytes,
        show_shards,
    )
    from labs.tensor_parallel.charts.need import show_one_sequence
    from labs.tensor_parallel.checks.linear_shards import check_linear_shards
    from labs.tensor_parallel.checks.regions import check_regions
    from labs.tensor_parallel.checks.tensor_parallel import check_tensor_parallel
    from labs.tensor_parallel.scaffold import map_input
    from labs.training.models import llama
    from labs.training.presets import preset
    # isort: split
    # part B: the vocabulary, and the norm of the gradients
    from labs.tensor_parallel.charts.gradient_norms import show_norms
    from labs.tensor_parallel.charts.loss_cost import show_loss_cost
    from labs.tensor_parallel.checks.clip_grad_norm import check_clip_grad_norm
    from labs.tensor_parallel.checks.vocabulary_embedding import check_vocabulary_embedding
    from labs.tensor_parallel.checks.vocabulary_parallel import check_vocabulary_parallel
    from labs.tensor_parallel.scaffold import set_loss
    # isort: split
    # part C: the sequence, and torch's own
    from labs.tensor_parallel.charts.dropout import show_masks
    from labs.tensor_parallel.charts.sequence import (
        show_activations,
        show_collectives_of_plan,
        show_comm_debug,
        show_layer_collectives,
    )
    from labs.tensor_parallel.checks.dropout_streams import check_dropout_streams
    from labs.tensor_parallel.checks.parallelize_plan import check_torchs_parallel
    from labs.tensor_parallel.checks.sequence_parallel import check_sequence_parallel
    from labs.tensor_parallel.scaffold import map_output
    from labs.tensor_parallel.sequence.activations import layer_activations
    from labs.tensor_parallel.sequence.collectives import (
        all_gather_sequence,
        join_sequence,
        reduce_scatter_sequence,
        split_sequence,
    )
    # isort: split
    # part D: a ring for long sequences
    from labs.tensor_parallel.charts.muon import show_sharded_muon
    from labs.tensor_parallel.charts.ring import (
        show_assignments,
        show_context_parallel,
        show_ring,
        show_ring_in_llama,
        show_ring_memory,
        show_rounds,
    )
    from labs.tensor_parallel.charts.ways import show_context_parallel_choice, show_three_ways
    from labs.tensor_parallel.checks.assign import check_assign
    from labs.tensor_parallel.checks.merge import check_merge
    from labs.tensor_parallel.checks.muon_update import check_muon_update
    from labs.tensor_parallel.checks.ring_attention import check_ring_attention
    from labs.tensor_parallel.ring.blocks import (
        block_attention,
        block_backward,
        causal_attention,
        full_attention,
    )
    from labs.training.muon import newton_schulz, pieces_of
    from labs.workers.collectives import reduce_scatter_single

__all__, __getattr__, __dir__ = lazy_exports(__name__)
