"""Parallel libraries as strategies: `strategy(model, optimizer_class, **kwargs)` returns (module,
optimizer), which the plain loop of labs.training.loop trains unchanged.

Every strategy is called on each rank. kwargs go to the optimizer, named arguments to the strategy.
The names are lazy, so that a rank imports only the library that it trains with.
"""

from labs.lazy_exports import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "plain": ".torch_strategies", "ddp": ".torch_strategies",
    "zero_redundancy": ".torch_strategies", "fsdp1": ".torch_strategies",
    "fsdp2": ".torch_strategies", "fsdp2_no_reshard": ".torch_strategies",
    "deepspeed1": ".third_party", "deepspeed2": ".third_party", "deepspeed3": ".third_party",
    "has_deepspeed": ".third_party", "accelerate_ddp": ".third_party",
    "accelerate_fsdp2": ".third_party",
    "resident_tensors": ".tensors_by_category",
})
