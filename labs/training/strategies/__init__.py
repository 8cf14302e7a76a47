"""What parallel libraries offer, each as a strategy: `strategy(model, optimizer_class, **kwargs)`
returns (module, optimizer), and the plain loop of labs.training.loop trains them unchanged.

Every strategy runs on a rank. kwargs go to the optimizer, named arguments to the strategy.
The names are looked up on first use, so that a rank loads only the library that it trains with.
"""

from labs.lookup import offered

__all__, __getattr__, __dir__ = offered(__name__, {
    "plain": ".torchs", "ddp": ".torchs", "zero_redundancy": ".torchs",
    "fsdp1": ".torchs", "fsdp2": ".torchs", "fsdp2_no_reshard": ".torchs",
    "deepspeed1": ".peers", "deepspeed2": ".peers", "deepspeed3": ".peers",
    "has_deepspeed": ".peers", "accelerate_ddp": ".peers", "accelerate_fsdp2": ".peers",
    "held": ".holdings",
})
