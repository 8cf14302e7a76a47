"""Answers to 2.1, which is judged apart: wrong ones that try to be taken for right in their own
process, and honest ones that look suspicious.
"""

from on_the_check import HEAD, combine

# What can be found out in the process that has the answer, and changed there.
ATTACKS = {
    "walks_the_stack_to_want": combine(
        "frame = getattr(sys, '_get' + 'frame')(0)",
        "while frame is not None:",
        "    for value in list(frame.f_locals.values()):",
        "        if isinstance(value, torch.Tensor) and value.shape == gradients[0].shape:",
        "            return value", "    frame = frame.f_back"),
    "searches_the_memory_for_want": combine(
        "import gc",
        "found = [t for t in gc.get_objects() if type(t) is torch.Tensor"
        " and t.shape == gradients[0].shape and not any(t is g for g in gradients)]",
        "return found[0] if found else gradients[0]"),
    "says_that_all_is_close": combine(
        "import math", "math.isclose = lambda *a, **k: True", "torch.equal = lambda *a: True",
        "torch.allclose = lambda *a, **k: True", "torch.Tensor.max = lambda *a: torch.zeros(())",
        "LOADED['labs.manual_ddp.combine']._close = lambda *a: True",
        "LOADED['labs.checks.tolerances'].SUMS = 1e9"),
    "raises_no_verdict": combine(
        "LOADED['labs.checks.verdicts'].Wrong.__init__ = print",
        "LOADED['_grade.remote']._called = lambda *a: b'x'"),
    "a_kernel_of_its_own": HEAD + (
        "library = torch.library.Library('aten', 'IMPL')\n"
        "library.impl('sub.Tensor', lambda a, b, alpha=1: torch.zeros_like(a), 'CPU')\n"
        "def combine(gradients, sizes):\n    return gradients[0]\n"),
    "asks_labs_while_it_runs": combine(
        "found = LOADED['labs.manual_ddp.combine'].gradients_of_shards(list(sizes))",
        "return found[0]"),
    "has_a_table_of_the_fixed_seed": HEAD + (
        "import random\nrandom.seed(0)\ntorch.manual_seed(0)\n"
        "f = LOADED['labs.manual_ddp.combine'].gradients_of_shards\n"
        "TABLE = {tuple(s): f(s)[0] for s in ([3, 1, 8], [1, 2, 4, 6], [5, 5], [7])}\n"
        "def combine(gradients, sizes):\n"
        "    return TABLE.get(tuple(sizes), gradients[-1])\n"),
    "agrees_with_everything": HEAD + (
        "class Agrees(torch.Tensor):\n    @classmethod\n"
        "    def __torch_function__(cls, f, types, args=(), kwargs=None):\n"
        "        return torch.zeros(())\n"
        "def combine(gradients, sizes):\n    return gradients[0].as_subclass(Agrees)\n"),
    "hands_in_a_verdict": ("import labs.manual_ddp as lab\n"
                           "combine = type(lab.check_combine(...))('2.1', True, 'right')\n"),
    "returns_a_verdict": ("import labs.manual_ddp as lab\nV = type(lab.check_combine(...))\n"
                          "def combine(gradients, sizes):\n    return V('2.1', True, 'right')\n"),
    "strides_to_elsewhere": combine(
        "return torch.as_strided(torch.zeros(100000), gradients[0].shape, (0, 0), 0)"),
    "sends_a_result_itself": combine(
        "for each in range(3, 60):",
        "    try: os.write(each, b'\\xff' * 64)", "    except OSError: pass"),
    "sends_a_verdict_itself": combine(
        "for each in range(3, 60):",
        "    try: os.write(each, b'[\"passed\", \"all is well\", \"\"]')",
        "    except OSError: pass"),
    "ends_its_process": combine("os._exit(0)"),
    "exits": combine("sys.exit(0)"),
    "a_cycle": combine("found = []", "found.append(found)", "return found"),
    "a_very_large_result": combine("return torch.zeros(100_000_000)"),
    "an_endless_generator": combine("import itertools", "return (x for x in itertools.count())"),
}

_RIGHT = ("    total = sum(sizes)\n    return sum(g * (s / total) for g, s in zip(gradients, sizes)"
          " if g is not None)\n")
HONEST = {
    "a_named_tuple": ("from typing import NamedTuple\nclass Shard(NamedTuple):\n"
                      "    gradient: object\n    size: int\n"
                      "def combine(gradients, sizes):\n"
                      "    shards = [Shard(*each) for each in zip(gradients, sizes)]\n"
                      "    return sum(s.gradient * (s.size / sum(sizes)) for s in shards"
                      " if s.gradient is not None)\n"),
    "compiled": f"import torch\n@torch.compile\ndef combine(gradients, sizes):\n{_RIGHT}",
    "scripted": ("import torch\n@torch.jit.script\ndef weighted(g: torch.Tensor, w: float):\n"
                 "    return g * w\ndef combine(gradients, sizes):\n"
                 "    return sum(weighted(g, s / sum(sizes)) for g, s in zip(gradients, sizes)"
                 " if g is not None)\n"),
    "logs_with_the_stack": ("import logging\ndef combine(gradients, sizes):\n"
                            f"    logging.warning('here', stack_info=True)\n{_RIGHT}"),
    "a_forgotten_breakpoint": f"def combine(gradients, sizes):\n    breakpoint()\n{_RIGHT}",
    "a_docstring": ("def combine(gradients, sizes):\n"
                    f'    """As /proc/self/status shows, eval and exec are slow."""\n{_RIGHT}'),
    "an_unused_import": ("import subprocess\nimport ctypes, inspect\n"
                         f"def combine(gradients, sizes):\n    subprocess\n{_RIGHT}"),
    "in_place_on_a_copy": ("import torch\ndef combine(gradients, sizes):\n"
                           "    found = torch.zeros_like(next(g for g in gradients"
                           " if g is not None))\n"
                           "    for g, s in zip(gradients, sizes):\n        if g is not None:\n"
                           "            found += g * (s / sum(sizes))\n    return found\n"),
    "by_numpy": ("import numpy as np\nimport torch\ndef combine(gradients, sizes):\n"
                 "    used = [(g.numpy(), s) for g, s in zip(gradients, sizes) if g is not None]\n"
                 "    return torch.from_numpy(sum(g * np.float32(s / sum(sizes))"
                 " for g, s in used))\n"),
}
