"""Why a module did not become a unit: names the mistake behind what `fully_shard` raises, and finds
units that the model does not run."""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from labs.checks.student_code import own_place
from labs.checks.verdicts import Wrong

_LOST = ("The wrapper that you sharded is not in the model: blocks[i] = wrapper puts it there, and "
         "then it is sharded.")


@contextlib.contextmanager
def explained(model: nn.Module | Callable[[], nn.Module]) -> Iterator[nn.Module | Callable]:
    """While a strategy builds: raises Wrong with the mistake where `fully_shard` refuses a module.
    Yields what the strategy is given: the model, or a function that makes it."""
    made = [model] if isinstance(model, nn.Module) else []

    def make_model():
        made.append(model())
        return made[-1]

    try:
        yield model if made else make_model
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        module, parameter = _refused(error)
        wrong = made and module is not None and _cause(module, parameter, made[-1])
        if not wrong:
            raise
        raise Wrong(wrong.sentence, wrong.hint, own_place(error), code=wrong.code) from None


def require_units_in_model(module: nn.Module) -> None:
    """Raises Wrong where parameters are shards that no unit of the module gathers."""
    if lost := _without_unit(module):
        raise _lost(lost)


def _refused(error) -> tuple[nn.Module | None, nn.Parameter | None]:
    """What `fully_shard` was called with, and the parameter that it could not shard, from the
    frames of what it raised."""
    # torch raises errors of common classes, which do not carry the module: it is a local variable
    # of fully_shard's frames. The files' names are private to torch.
    module, parameter, trace = None, None, error.__traceback__
    while trace is not None:
        file, names = trace.tb_frame.f_code.co_filename, trace.tb_frame.f_locals
        # contract.py holds the decorator of fully_shard, which refuses a second call.
        if file.endswith(("_fully_shard.py", "contract.py")):
            module = names.get("module", module)
        if file.endswith("_fsdp_param.py"):
            parameter = names.get("param", parameter)
        trace = trace.tb_next
    module = module[0] if isinstance(module, list | tuple) and module else module
    return (module if isinstance(module, nn.Module) else None), parameter


def _cause(module, parameter, model) -> Wrong | None:
    name = _name(module, model)
    if isinstance(module, FSDPModule):
        return Wrong(f"{name} is a unit already, and fully_shard is called on it again",
                     "fully_shard once for each block, and once for the model.",
                     code="sharded_twice")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return Wrong(f"a {type(module).__name__} cannot be a unit: it has no forward, before which "
                     "its parameters could be gathered", "fully_shard each of its modules.",
                     code="unit_without_forward")
    if not isinstance(parameter, DTensor):
        return None
    # A parameter stays with the first unit that took it: an outer one took those of this module.
    for outer in model.modules():
        if isinstance(outer, FSDPModule) and any(p is parameter for p in outer.parameters()):
            return Wrong(f"the parameters of {name} already belong to another unit, that of "
                         f"{_name(outer, model)}", "Shard the blocks first, the model last."
                         if outer is model else
                         "A block is one unit: nothing inside it is sharded after it.",
                         code="units_overlap")
    return _lost(next((name for name, p in model.named_parameters() if p is parameter), "a module"))


def _without_unit(model) -> str:
    """The name of the first parameter that is a shard and in no unit of the model; or empty."""
    in_units = {id(p) for unit in model.modules() if isinstance(unit, FSDPModule)
                for p in unit.parameters()}
    return next((name for name, p in model.named_parameters()
                 if isinstance(p, DTensor) and id(p) not in in_units), "")


def _lost(name) -> Wrong:
    return Wrong(f"{name!r} was sharded in a unit that is not in the model, so nothing gathers it "
                 "before the model's forward", _LOST, code="unit_not_in_model")


def _name(module, model) -> str:
    name = next((name for name, one in model.named_modules() if one is module), None)
    return "the model" if name == "" else repr(name) if name else f"a {type(module).__name__}"
