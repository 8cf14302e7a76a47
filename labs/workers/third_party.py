"""The third-party modules that every rank needs, and that take seconds to import."""

MODULES = [
    "numpy",
    "cloudpickle",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # torch.optim imports it at the first step
    "torch.distributed.optim",  # ZeroRedundancyOptimizer
    "torch.profiler",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    # The file of an exercise has its check and its pictures, so to run the one imports the
    # other: 0.25 s of CPU for each rank that would have to import matplotlib itself.
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
]
