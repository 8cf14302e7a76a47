"""Right answers to exercise 1.7, in many styles: name -> (source of helper cells, source)."""


HEAD = "def rank_states(count, strategy, ranks):\n"


def _body(text: str, before: str = "", helper: str = "") -> tuple[str, str]:
    lines = "".join(f"    {line}\n" if line else "\n" for line in text.strip("\n").split("\n"))
    return helper, f"{before}{HEAD}{lines}"


_N = "n = ranks if strategy == 'FSDP2' else 1\n"
_B = "b = 4 * count if strategy == 'DDP' else 0\n"
_S = _N + "s = 4 * count / n\n" + _B
_RETURNS = {
    "tuple_": "s, s, 2 * s, b", "list_": "[s, s, 2 * s, b]",
    "floats": "tuple(map(float, (s, s, 2 * s, b)))",
    "generator": "(x for x in (s, s, 2 * s, b))", "numpy": "np.array([s, s, 2 * s, b])",
    "numpy_product": "s * np.array([1, 1, 2, b / s])", "tensor": "torch.tensor([s, s, 2 * s, b])",
    "tensor64": "torch.tensor([s, s, 2 * s, b], dtype=torch.float64)",
    "map_": "map(lambda x: x * s, (1, 1, 2, b / s))",
    "comprehension": "[x * s for x in (1, 1, 2)] + [b]",
    "starred": "(*[s] * 2, 2 * s, b)", "fractions": "tuple(Fraction(x) for x in (s, s, 2 * s, b))",
    "zip_": "[x * y for x, y in zip((s, s, s, b), (1, 1, 2, 1))]",
    "operator": "[*map(operator.mul, (s, s, s, b), (1, 1, 2, 1))]",
    "ints": "int(s), int(s), int(2 * s), int(b)",
    "named": "States(s, s, 2 * s, b)",
    "dictionary": "tuple({'p': s, 'g': s, 'o': 2 * s, 'b': b}.values())",
    "numpy_scalars": "tuple(map(np.float64, (s, s, 2 * s, b)))",
    "accumulate": "(s, s, sum([s, s]), b)",
    "scalar_tensors": "tuple(torch.tensor(x, dtype=torch.float64) for x in (s, s, 2 * s, b))"}
_IMPORTS = ("import numpy as np\nimport torch\nimport operator\nfrom fractions import Fraction\n"
            "from collections import namedtuple\nStates = namedtuple('States', 'p g o b')\n")
ANSWERS = {name: _body(f"{_S}return {text}", helper=_IMPORTS) for name, text in _RETURNS.items()}
_CASES = {
    "if_elif": "if strategy == 'FSDP2':\n    each = 4 * count / ranks\n"
               "    return each, each, 2 * each, 0\n"
               "elif strategy == 'DDP':\n    return 4 * count, 4 * count, 8 * count, 4 * count\n"
               "else:\n    return 4 * count, 4 * count, 8 * count, 0",
    "match_": "match strategy:\n    case 'FSDP2':\n        n, copies = ranks, 0\n    case 'DDP':\n"
              "        n, copies = 1, 1\n    case _:\n        n, copies = 1, 0\n"
              "return 4 * count / n, 4 * count / n, 8 * count / n, copies * 4 * count",
    "table": "n, copies = {'plain': (1, 0), 'DDP': (1, 1), 'FSDP2': (ranks, 0)}[strategy]\n"
             "return 4 * count / n, 4 * count / n, 8 * count / n, copies * 4 * count",
    "get": "n = {'FSDP2': ranks}.get(strategy, 1)\n"
           "return 4 * count / n, 4 * count / n, "
           "8 * count / n, {'DDP': 4 * count}.get(strategy, 0)",
    "booleans": "n = ranks ** (strategy == 'FSDP2')\n"
                "return 4 * count / n, 4 * count / n, "
                "8 * count / n, 4 * count * (strategy == 'DDP')",
    "lower": "kind = strategy.lower()\nn = ranks if kind.startswith('fsdp') else 1\n"
             "return 4 * count / n, 4 * count / n, "
             "8 * count / n, 4 * count if kind == 'ddp' else 0",
    "floor": "shard = 4 * count / (ranks if strategy == 'FSDP2' else 1)\n"
             "return shard, shard, shard * 2, shard * (strategy == 'DDP')",
    "loop": "found = []\nfor size in (4, 4, 8):\n"
            "    found.append(size * count / (ranks if strategy == 'FSDP2' else 1))\n"
            "found.append(4 * count if strategy == 'DDP' else 0)\nreturn found",
    "append": "found = [4 * count, 4 * count, 8 * count]\nif strategy == 'FSDP2':\n"
              "    found = [x / ranks for x in found]\n"
              "return found + [4 * count if strategy == 'DDP' else 0]",
    "nested": "def share(size):\n"
              "    return size * count / (ranks if strategy == 'FSDP2' else 1)\n\n"
              "return share(4), share(4), share(8), 4 * count if strategy == 'DDP' else 0",
    "floor_division": "n = ranks if strategy == 'FSDP2' else 1\np = 4 * count // n\n"
                      "return p, p, 2 * p, 4 * count if strategy == 'DDP' else 0",
    "walrus": "return ((s := 4 * count / (ranks if strategy == 'FSDP2' else 1)), s, 2 * s,\n"
              "        4 * count if strategy == 'DDP' else 0)",
    "itemsize": "e = torch.float32.itemsize\nn = ranks if strategy == 'FSDP2' else 1\n"
                "return e * count / n, e * count / n, 2 * e * count / n, "
                "e * count * (strategy == 'DDP')",
    "recursion": "if strategy == 'FSDP2':\n"
                 "    return [x / ranks for x in rank_states(count, 'plain', 1)]\n"
                 "return 4 * count, 4 * count, 8 * count, 4 * count if strategy == 'DDP' else 0"}
ANSWERS |= {name: _body(text) for name, text in _CASES.items()}
ANSWERS |= {
    "typed": ("", "def rank_states(count: int, strategy: str, ranks: int) -> tuple[float, ...]:\n"
                  "    \"\"\"Bytes.\"\"\"\n    n: int = ranks if strategy == 'FSDP2' else 1\n"
                  "    s: float = 4 * count / n\n"
                  "    return s, s, 2 * s, (4 * count if strategy == 'DDP' else 0)\n"),
    "lambda_": ("", "rank_states = lambda count, strategy, ranks: tuple(x * count / (ranks if "
                    "strategy == 'FSDP2' else 1) for x in (4, 4, 8)) + "
                    "((4 * count,) if strategy == 'DDP' else (0,))\n"),
    "constants": _body("n = ranks if strategy == 'FSDP2' else 1\nreturn FP32 * count / n, FP32 * "
                       "count / n, MOMENTS * FP32 * count / n, FP32 * count * (strategy == 'DDP')",
                       helper="FP32 = 4\nMOMENTS = 2\n"),
    "helper_cell": _body(_B + "s = shard(count, strategy, ranks)\nreturn s, s, 2 * s, b",
                         helper="def shard(count, strategy, ranks):\n    return 4 * count / "
                                "(ranks if strategy == 'FSDP2' else 1)\n"),
    "class_": _body(_S + "return Held(s, b).all()",
                    "class Held:\n    def __init__(self, s, b):\n        self.s, self.b = s, b\n\n"
                    "    def all(self):\n        return self.s, self.s, 2 * self.s, self.b\n\n\n"),
    "cached": _body(_S + "return s, s, 2 * s, b", "import functools\n\n\n@functools.lru_cache\n")}
