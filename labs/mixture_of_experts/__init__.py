"""Notebook 09: mixture of experts, expert parallelism by hand, balance, and experts with FSDP.

The names are looked up on first use, so that a notebook begins at once.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    # part 1: one layer, experts on ranks, gradients
    from labs.mixture_of_experts.adamw_hides_it import show_adamw_hides_it
    from labs.mixture_of_experts.average_gradients import check_average_gradients
    from labs.mixture_of_experts.count_parameters import (
        check_count_parameters,
        on_meta,
        show_parameters,
    )
    from labs.mixture_of_experts.expert_layer import check_expert_layer, show_dispatch
    from labs.mixture_of_experts.expert_parallel import check_expert_parallel, show_bytes
    from labs.mixture_of_experts.name_fault import check_name_fault, show_gradients
    # isort: split
    # part 2: balance, FSDP, size
    from labs.mixture_of_experts.balance import check_balance
    from labs.mixture_of_experts.balance_pictures import show_balance, show_micro_batches
    from labs.mixture_of_experts.dual_pipe import show_dual_pipe
    from labs.mixture_of_experts.expert_fsdp import check_expert_fsdp, show_memory, show_trace
    from labs.mixture_of_experts.layer_bytes import (
        check_layer_bytes,
        show_layer_bytes,
        show_measured_bytes,
    )
    from labs.mixture_of_experts.plans import show_plans, show_published_runs
    from labs.mixture_of_experts.slowest_rank import show_slowest_rank
    from labs.mixture_of_experts.within_capacity import check_within_capacity, show_dropped
    # isort: split
    # a script of one's own, and what is optional
    from labs.checks.scripts.commands import torchrun
    from labs.checks.scripts.files import write_script
    from labs.mixture_of_experts.diloco import check_diloco, show_diloco
    from labs.mixture_of_experts.expert_checkpoint import check_expert_checkpoint
    from labs.mixture_of_experts.grouped_experts import check_grouped_experts
    from labs.mixture_of_experts.moe import check_moe
    from labs.mixture_of_experts.types_of_ranks import show_types
    from labs.mixture_of_experts.weight_sync import check_weight_sync

__all__, __getattr__, __dir__ = lazy_exports(__name__)
