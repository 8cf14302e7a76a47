"""Parallel libraries as strategies: `strategy(model, optimizer_class, **kwargs)` returns (module,
optimizer), which the plain loop of labs.training.loop trains unchanged.

Every strategy is called on each rank. kwargs go to the optimizer, named arguments to the strategy.
The names are lazy, so that a rank imports only the library that it trains with.
"""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.training.strategies.tensors_by_category import resident_tensors
    from labs.training.strategies.third_party import (
        LIVE_BLOCKS,
        deepspeed1,
        deepspeed2,
        deepspeed3,
        deepspeed_config,
        has_deepspeed,
        largest_block,
    )
    from labs.training.strategies.torch_strategies import (
        ddp,
        fsdp1,
        fsdp2,
        fsdp2_no_reshard,
        plain,
        zero_redundancy,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
