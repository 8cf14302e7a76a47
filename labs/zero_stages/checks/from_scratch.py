"""Exercise 3.10: ZeRO-3 without the lab's scaffold."""

from collections.abc import Callable

from labs.exercises.on_ranks import labs_own_refused
from labs.exercises.verdicts import check
from labs.zero_stages.checks.reference import STEPS
from labs.zero_stages.checks.stages import verify_stage
from labs.zero_stages.flat_parameter import FlatParameter
from labs.zero_stages.scaffold.module import ShardedModule
from labs.zero_stages.scaffold.optimizer import ShardedOptimizer

_NOT_GATHERED = ("A layer computes while its storage is empty: gather it before each forward and "
                 "before each backward, whenever it is not gathered.")
_HINTS = {words: _NOT_GATHERED for words in ("storage of size 0", "SIGSEGV", "SIGABRT", "SIGBUS")}
_SCAFFOLD = (FlatParameter, ShardedModule, ShardedOptimizer)
_REFUSED = ("Build it from torch's hooks and storages; lab.layer_groups, lab.tensors_in and the "
            "two collectives may stay.")


@check("3.10", hints=_HINTS)
def check_from_scratch(strategy: Callable):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-3 of torch's hooks
    and storages and of the lab's two collectives, held to the invariants of exercise 3.4."""
    def without_scaffold(model, optimizer_class, **settings):
        with labs_own_refused(_SCAFFOLD, _REFUSED):
            return strategy(model, optimizer_class, **settings)

    verify_stage(without_scaffold, 3)
    return (f"built without the scaffold: its losses are the reference's over {STEPS} steps on 2, "
            "3 and 4 ranks, it keeps 16Ψ/N bytes and one layer, and moves 3Ψ elements")
