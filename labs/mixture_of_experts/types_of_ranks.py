"""Types of tensors on ranks: what `spmd-types` infers and refuses, in a function that runs on 2 × 2
ranks with it and without it."""

import importlib.util
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labs.checks.verdicts import Verdict
from labs.pictures.in_scripts import print_in_script
from labs.pictures.tables import Table
from labs.workers import devices
from labs.workers.collectives import has_nccl
from labs.workers.launcher import launch

VERSION = "0.3.1"  # as the extra `types` in pyproject.toml
NOT_INSTALLED = (f"waits for spmd-types, which is not installed: run %pip install spmd-types=="
                 f"{VERSION} in a cell of its own (0.5 MB on disk), then this cell again; nothing "
                 "else needs it")
TITLE = "Types of ranks"
SHAPE = (2, 2)  # of the mesh


def has_spmd_types() -> bool:
    """Whether spmd-types is installed: the extra `types`. Does not import it."""
    return importlib.util.find_spec("spmd_types") is not None


def show_types(function: Callable[..., dict[str, torch.Tensor]], dimensions: tuple[str, str],
               *arguments: Any, shards: bool = True) -> Table | Verdict:
    """Runs function(mesh, *arguments) on 2 × 2 ranks, a mesh with these dimensions, while
    spmd-types checks it, and once more without. Shows the types of the tensors that it returns and
    of their gradients; or what is refused, and what torch computes then.

    shards: whether the checker also follows along which dimension of a tensor its shards lie. It
    needs that to infer a partial sum. A Verdict where spmd-types is not installed.
    """
    if not has_spmd_types():
        return print_in_script(Verdict(TITLE, None, NOT_INSTALLED))
    found, shapes = launch(_run_on_any_torch, function, dimensions, arguments, shards, ranks=4,
                           quiet=True)[0]
    if isinstance(found, str):
        return Table(function.__name__, ("", ""), [
            ("with types", f"refused: {found}"),
            ("without them", "no error; " + ", ".join(
                f"{name} {shape}" for name, shape in shapes.items()))], left=1)
    return Table(function.__name__, ("", *dimensions, *(
        f"gradient: {name}" for name in dimensions)), [
            (name, *map(repr, types), *map(repr, of_gradient))
            for name, (types, of_gradient) in found.items()])


def _run_on_any_torch(*arguments) -> tuple[Any, dict[str, tuple]]:
    if torch.__version__ >= (2, 12) or has_nccl():
        return _run_twice(*arguments)
    # In torch 2.11 gloo has no all-to-all of lists, with which spmd-types sends.
    with mock.patch.object(dist, "all_to_all", _all_to_all):
        return _run_twice(*arguments)


def _all_to_all(outputs, inputs, group=None):
    """torch.distributed.all_to_all of equal parts."""
    arrived = torch.stack(outputs)
    dist.all_to_all_single(arrived, torch.stack(inputs), group=group)
    torch._foreach_copy_(outputs, list(arrived))


def _run_twice(function, dimensions, arguments, shards) -> tuple[Any, dict[str, tuple]]:
    """(types of each tensor and of its gradient, or why it is refused; shapes without types)."""
    import spmd_types as spmd
    import spmd_types.checker  # noqa: F401

    mesh = init_device_mesh(devices.device().type, SHAPE, mesh_dim_names=dimensions)
    torch.manual_seed(0)
    try:
        with spmd.set_current_mesh(mesh), spmd.checker.typecheck(local=not shards):
            tensors = function(mesh, *arguments)
        found = {name: _types(tensor, dimensions, spmd) for name, tensor in tensors.items()}
    except spmd.SpmdTypeError as error:
        # Its later lines are advice and the signature of the operation.
        found = str(error).splitlines()[0].partition(" Found types")[0]
        found = found.replace("mesh_", "").replace("PerMeshAxisLocalSpmdType.", "")
    torch.manual_seed(0)
    with spmd.set_current_mesh(mesh):
        plain = function(mesh, *arguments)
    return found, {name: tuple(tensor.shape) for name, tensor in plain.items()}


def _types(tensor, dimensions, spmd) -> tuple[list, list]:
    # An axis is named after its mesh: "mesh_tensor".
    of_axis = {repr(axis).removeprefix("mesh_"): kind
               for axis, kind in spmd.get_local_type(tensor).items()}
    types = [of_axis[name] for name in dimensions]
    return types, [kind.backward_type() for kind in types]
