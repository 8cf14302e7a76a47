"""Notebook 07a: tensor and sequence parallelism by hand, beside torch's own, and ring attention.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # a script of one's own
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.tensor_parallel.tp import check_tp
    # isort: split
    # part A: linear layers, attention, a whole Llama
    from labs.tensor_parallel.linear_shards import check_linear_shards
    from labs.tensor_parallel.one_sequence import show_one_sequence
    from labs.tensor_parallel.regions import check_regions
    from labs.tensor_parallel.scaffold import map_input
    from labs.tensor_parallel.tensor_parallel import (
        check_tensor_parallel,
        show_all_reduces,
        show_resident_bytes,
        show_shards,
    )
    from labs.training.models import llama
    from labs.training.presets import preset
    # isort: split
    # part B: the vocabulary, and the norm of the gradients
    from labs.tensor_parallel.clip_grad_norm import check_clip_grad_norm, show_norms
    from labs.tensor_parallel.scaffold import set_loss
    from labs.tensor_parallel.vocabulary_embedding import check_vocabulary_embedding
    from labs.tensor_parallel.vocabulary_parallel import check_vocabulary_parallel, show_loss_cost
    # isort: split
    # part C: the sequence, and torch's own
    from labs.tensor_parallel.dropout_streams import check_dropout_streams, show_masks
    from labs.tensor_parallel.scaffold import split_hidden_states
    from labs.tensor_parallel.sequence_parallel import (
        check_sequence_parallel,
        show_activations,
        show_collectives_of_plan,
        show_layer_collectives,
    )
    from labs.tensor_parallel.torchs_parallel import check_torchs_parallel, show_comm_debug
    # isort: split
    # part D: a ring for long sequences
    from labs.tensor_parallel.assign import (
        check_assign,
        show_assignments,
        show_context_parallel,
        show_ring_in_llama,
        show_rounds,
    )
    from labs.tensor_parallel.attention_blocks import (
        block_attention,
        block_backward,
        causal_attention,
        full_attention,
    )
    from labs.tensor_parallel.context_parallel import show_context_parallel_choice, show_three_ways
    from labs.tensor_parallel.merge import check_merge, show_ring
    from labs.tensor_parallel.ring_attention import check_ring_attention, show_ring_memory

__all__, __getattr__, __dir__ = lazy_exports(__name__)
