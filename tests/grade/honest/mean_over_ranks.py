"""Right answers to exercise 0.1, in many styles: name -> (source of helper cells, source)."""

HEAD = "def mean_over_ranks(mine):\n"


def _body(text: str, before: str = "", helper: str = "") -> tuple[str, str]:
    lines = "".join(f"    {line}\n" if line else "\n" for line in text.strip("\n").split("\n"))
    return helper, f"{before}{HEAD}{lines}"


_N = "dist.get_world_size()"
_LIST = "parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]\n"
ANSWERS = {
    "clone": _body(f"x = mine.clone()\ndist.all_reduce(x)\nreturn x / {_N}"),
    "detach_clone": _body(f"x = mine.detach().clone()\ndist.all_reduce(x)\nreturn x / {_N}"),
    "in_place_division": _body(f"x = mine.clone()\ndist.all_reduce(x)\nx /= {_N}\nreturn x"),
    "div_": _body(f"x = mine.clone()\ndist.all_reduce(x)\nreturn x.div_({_N})"),
    "divide_first": _body(f"x = mine / {_N}\ndist.all_reduce(x)\nreturn x"),
    "times_inverse": _body(f"x = mine * (1 / {_N})\ndist.all_reduce(x)\nreturn x"),
    "op_sum": _body(f"x = mine.clone()\ndist.all_reduce(x, op=dist.ReduceOp.SUM)\nreturn x / {_N}"),
    "async_wait": _body("x = mine.clone()\nwork = dist.all_reduce(x, async_op=True)\nwork.wait()\n"
                        f"return x / {_N}"),
    "async_one_line": _body("x = mine.clone()\ndist.all_reduce(x, async_op=True).wait()\n"
                            f"return x / {_N}"),
    "async_future": _body("x = mine.clone()\nwork = dist.all_reduce(x, async_op=True)\n"
                          f"n = {_N}\nwork.wait()\nreturn x.div(n)"),
    "group": _body("x = mine.clone()\ndist.all_reduce(x, group=dist.group.WORLD)\n"
                   "return x / dist.get_world_size(dist.group.WORLD)"),
    "torch_distributed": _body("x = mine.clone()\ntorch.distributed.all_reduce(x)\n"
                               "return x / torch.distributed.get_world_size()"),
    "imported": _body("x = mine.clone()\nall_reduce(x)\nreturn x / get_world_size()",
                      "from torch.distributed import all_reduce, get_world_size\n"),
    "all_gather": _body(_LIST + "dist.all_gather(parts, mine)\n"
                                "return torch.stack(parts).mean(dim=0)"),
    "all_gather_sum": _body(_LIST + f"dist.all_gather(parts, mine)\nreturn sum(parts) / {_N}"),
    "all_gather_contiguous": _body(_LIST + "dist.all_gather(parts, mine.contiguous())\n"
                                           f"return torch.stack(parts, 0).sum(0) / {_N}"),
    "all_gather_into_tensor": _body(
        f"n = {_N}\nout = torch.empty(n * mine.numel(), dtype=mine.dtype, device=mine.device)\n"
        "dist.all_gather_into_tensor(out, mine.flatten())\n"
        "return out.view(n, *mine.shape).mean(0)"),
    "gather_objects": _body(f"found = [None] * {_N}\ndist.all_gather_object(found, mine)\n"
                            "return torch.stack(found).mean(0)"),
    "reduce_broadcast": _body(f"x = mine.clone()\ndist.reduce(x, dst=0)\nx /= {_N}\n"
                              "dist.broadcast(x, src=0)\nreturn x"),
    "reduce_scatter_all_gather": _body(
        f"n = {_N}\nflat = mine.flatten()\npad = -flat.numel() % n\n"
        "full = torch.cat([flat, flat.new_zeros(pad)])\nown = full.new_empty(full.numel() // n)\n"
        "dist.reduce_scatter_tensor(own, full)\nout = torch.empty_like(full)\n"
        "dist.all_gather_into_tensor(out, own / n)\n"
        "return out[:flat.numel()].view_as(mine)"),
    "functional": _body("x = fc.all_reduce(mine, 'sum', dist.group.WORLD)\n"
                        f"return fc.wait_tensor(x) / {_N}",
                        "import torch.distributed._functional_collectives as fc\n"),
    "nn_functional": _body(f"return all_reduce(mine.clone()) / {_N}",
                           "from torch.distributed.nn.functional import all_reduce\n"),
    "broadcast_each": _body(f"total = torch.zeros_like(mine)\nfor rank in range({_N}):\n"
                            "    x = mine.clone()\n    dist.broadcast(x, src=rank)\n"
                            f"    total += x\nreturn total / {_N}"),
    "float64": _body(f"x = mine.to(torch.float64, copy=True)\ndist.all_reduce(x)\n"
                     f"return (x / {_N}).to(mine.dtype)"),
    "to_copy": _body(f"x = mine.to(mine.dtype, copy=True)\ndist.all_reduce(x)\nreturn x / {_N}"),
    "torch_clone": _body(f"x = torch.clone(mine)\ndist.all_reduce(x)\nreturn torch.div(x, {_N})"),
    "deepcopy": _body(f"x = copy.deepcopy(mine)\ndist.all_reduce(x)\nreturn x / {_N}",
                      "import copy\n"),
    "plus_zero": _body(f"x = mine + 0\ndist.all_reduce(x)\nreturn x / {_N}"),
    "empty_copy": _body("x = torch.empty_like(mine)\nx.copy_(mine)\ndist.all_reduce(x)\n"
                        f"return x / {_N}"),
    "numpy_scalar": _body(f"x = mine.clone()\ndist.all_reduce(x)\nreturn x / int(np.int64({_N}))",
                          "import numpy as np\n"),
    "no_grad": _body(f"x = mine.clone()\ndist.all_reduce(x)\nreturn x / {_N}",
                     "@torch.no_grad()\n"),
    "barrier": _body(f"x = mine.clone()\ndist.barrier()\ndist.all_reduce(x)\nreturn x / {_N}"),
    "world_size_by_sum": _body("x, one = mine.clone(), torch.ones(1, device=mine.device)\n"
                               "dist.all_reduce(x)\ndist.all_reduce(one)\n"
                               "return x / one.item()"),
    "nested_helper": _body("def total(x):\n    x = x.clone()\n    dist.all_reduce(x)\n"
                           f"    return x\n\nreturn total(mine) / {_N}"),
    "helper_cell": _body(f"return summed(mine) / {_N}",
                         helper="def summed(x):\n    x = x.clone()\n    dist.all_reduce(x)\n"
                                "    return x\n"),
    "constant": _body(f"x = mine.clone()\ndist.all_reduce(x, op=OP)\nreturn x / {_N}",
                      helper="OP = dist.ReduceOp.SUM\n"),
    "class_": _body("return Mean()(mine)",
                    "class Mean:\n    def __call__(self, x):\n        x = x.clone()\n"
                    f"        dist.all_reduce(x)\n        return x / {_N}\n\n\n"),
    "typed": ("", "def mean_over_ranks(mine: torch.Tensor) -> torch.Tensor:\n"
                  "    \"\"\"The mean over all ranks.\"\"\"\n    n: int = dist.get_world_size()\n"
                  "    x: torch.Tensor = mine.clone()\n    dist.all_reduce(x)\n    return x / n\n"),
    "walrus": _body(f"dist.all_reduce(x := mine.clone())\nreturn x / {_N}"),
    "partial": _body(f"x = mine.clone()\nadd(x)\nreturn x / {_N}",
                     "from functools import partial\nadd = partial(dist.all_reduce, "
                     "op=dist.ReduceOp.SUM)\n"),
    "prints": _body("print('rank', dist.get_rank(), mine)\nx = mine.clone()\n"
                    f"dist.all_reduce(x)\nassert x.shape == mine.shape\nreturn x / {_N}"),
}
