"""Strategies of libraries other than torch: DeepSpeed's ZeRO 1, 2 and 3, and Accelerate."""

import functools
import importlib.util
import logging
import os
from contextlib import contextmanager
from unittest import mock

from labs.training.loop import ModuleAndOptimizer
from labs.training.models import blocks
from labs.workers import devices

LIVE_BLOCKS = 2  # whole at once in DeepSpeed's stage 3: the one that computes, and one ahead


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed: the extra `third-party`."""
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed(model, optimizer_class, stage: int, **kwargs) -> ModuleAndOptimizer:
    """DeepSpeed's ZeRO of this stage, around an optimizer of optimizer_class.

    The plain loop stays unchanged: since 0.18 DeepSpeed works inside `loss.backward()` through
    hooks of its own, so only `step` calls its engine, which also clears the gradients. Its buffers
    and thresholds, by default for billions of parameters, are scaled to one block of this model.

    Raises ModuleNotFoundError where DeepSpeed is not installed.
    """
    library = _deepspeed()
    optimizer = optimizer_class(model.parameters(), **kwargs)
    _name_own_gpu()
    with _without_compiler():
        engine, *_ = library.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(model, stage),
            dist_init_required=False)
    return engine, EngineOptimizer(engine)


@contextmanager
def _without_compiler():
    """Inside, DeepSpeed compiles nothing that is not used here: neither its op for shared memory,
    for a minute on a CPU, nor the optimizer Muon, for which it imports torch's whole compiler."""
    with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None), \
            mock.patch("deepspeed.runtime.compiler.compile", lambda: lambda function: function):
        yield


def _name_own_gpu() -> None:
    """On a rank: LOCAL_RANK becomes the number of its GPU, which both libraries take it for: where
    ranks share GPUs, there are fewer of these than ranks. For good: DeepSpeed's stage 3 reads it
    again in forward."""
    own = devices.device().index
    if own is not None:
        os.environ["LOCAL_RANK"] = str(own)


deepspeed1 = functools.partial(deepspeed, stage=1)
deepspeed2 = functools.partial(deepspeed, stage=2)
deepspeed3 = functools.partial(deepspeed, stage=3)


def _deepspeed():
    if not has_deepspeed():
        raise ModuleNotFoundError(
            "DeepSpeed is not installed: it comes with the extra `third-party`, which "
            "./scripts/test installs; without it, leave DeepSpeed out of the comparison")
    os.environ["DS_ACCELERATOR"] = devices.device().type
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed as library

    library.utils.logger.setLevel(logging.ERROR)
    return library


def largest_block(model) -> int:
    """Returns the parameters of the model's largest block; without blocks, those of the model."""
    return max((sum(p.numel() for p in block.parameters()) for block in blocks(model)),
               default=sum(p.numel() for p in model.parameters()))


def deepspeed_config(model, stage: int) -> dict:
    """What `deepspeed.initialize` is told: the stage, buckets and prefetch of one block's size, and
    that small parameters are sharded too.

    The last blocks stay gathered from forward to backward, up to LIVE_BLOCKS of them, although the
    reuse distance is 0: prefetch passes over what is still whole, and DeepSpeed frees nothing that
    prefetch has passed over (PartitionedParameterCoordinator.__params_to_release).
    """
    block = largest_block(model)
    zero = {"stage": stage, "reduce_bucket_size": block, "allgather_bucket_size": block,
            "stage3_prefetch_bucket_size": block, "stage3_max_live_parameters": LIVE_BLOCKS * block,
            "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
            "gradient_clipping": 0.0,  # by default DeepSpeed clips at a norm of 1
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


class EngineOptimizer:
    """DeepSpeed's engine as an optimizer."""

    def __init__(self, engine):
        self.engine = engine

    @property
    def param_groups(self) -> list:
        return self.engine.optimizer.param_groups

    @property
    def state(self) -> dict:
        """The state of the inner optimizer, by its flat partition."""
        return self.engine.optimizer.optimizer.state

    def step(self):
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True):
        """Does nothing: the engine's step has cleared the gradients."""
