"""Right answers to exercise 2.1, in many styles: name -> (source of helper cells, source)."""


HEAD = "def combine(gradients, sizes):\n"
USED = "[(g, s) for g, s in zip(gradients, sizes) if g is not None]"


def _body(text: str, before: str = "", helper: str = "") -> tuple[str, str]:
    lines = "".join(f"    {line}\n" if line else "\n" for line in text.strip("\n").split("\n"))
    return helper, f"{before}{HEAD}{lines}"


ANSWERS = {
    "loop": _body("total = sum(sizes)\nresult = 0\nfor g, s in zip(gradients, sizes):\n"
                  "    if g is not None:\n        result = result + g * s / total\nreturn result"),
    "loop_continue": _body("result = None\nfor g, s in zip(gradients, sizes):\n"
                           "    if g is None:\n        continue\n    part = g * (s / sum(sizes))\n"
                           "    result = part if result is None else result + part\nreturn result"),
    "index": _body("result = 0\nfor i in range(len(sizes)):\n    if gradients[i] is not None:\n"
                   "        result = result + sizes[i] * gradients[i]\nreturn result / sum(sizes)"),
    "enumerate": _body("result = 0\nfor i, g in enumerate(gradients):\n    if g is not None:\n"
                       "        result = result + sizes[i] * g\nreturn result / sum(sizes)"),
    "while_loop": _body("i, result = 0, 0\nwhile i < len(sizes):\n"
                        "    if gradients[i] is not None:\n"
                        "        result = result + sizes[i] * gradients[i]\n    i += 1\n"
                        "return result / sum(sizes)"),
    "generator": _body(f"return sum(g * (s / sum(sizes)) for g, s in {USED})"),
    "comprehension": _body(f"parts = [g * s for g, s in {USED}]\nreturn sum(parts) / sum(sizes)"),
    "start": _body(f"used = {USED}\nreturn sum((g * s for g, s in used), torch.zeros_like("
                   "used[0][0])) / sum(sizes)"),
    "zeros_like": _body("first = next(g for g in gradients if g is not None)\n"
                        "result = torch.zeros_like(first)\n"
                        "for g, s in zip(gradients, sizes):\n    if g is not None:\n"
                        "        result += g * (s / sum(sizes))\nreturn result"),
    "add_alpha": _body("first = next(g for g in gradients if g is not None)\n"
                       "result = torch.zeros_like(first)\n"
                       "for g, s in zip(gradients, sizes):\n    if g is not None:\n"
                       "        result.add_(g, alpha=s / sum(sizes))\nreturn result"),
    "none_to_zeros": _body("like = next(g for g in gradients if g is not None)\n"
                           "full = [torch.zeros_like(like) if g is None else g\n"
                           "        for g in gradients]\n"
                           "return sum(g * s for g, s in zip(full, sizes)) / sum(sizes)"),
    "stack": _body("like = next(g for g in gradients if g is not None)\n"
                   "full = torch.stack([torch.zeros_like(like) if g is None else g "
                   "for g in gradients])\nw = torch.tensor(sizes, dtype=full.dtype)\n"
                   "w = w / w.sum()\nreturn (full * w.view(-1, *[1] * like.dim())).sum(0)"),
    "einsum": _body(f"used = {USED}\nw = torch.tensor([s / sum(sizes) for _, s in used], "
                    "dtype=used[0][0].dtype)\n"
                    "return torch.einsum('i,i...->...', w, torch.stack([g for g, _ in used]))"),
    "tensordot": _body(f"used = {USED}\nw = torch.tensor([s / sum(sizes) for _, s in used], "
                       "dtype=used[0][0].dtype)\n"
                       "return torch.tensordot(w, torch.stack([g for g, _ in used]), dims=1)"),
    "matmul": _body(f"used = {USED}\nrows = torch.stack([g.flatten() for g, _ in used])\n"
                    "w = torch.tensor([s for _, s in used], dtype=rows.dtype) / sum(sizes)\n"
                    "return (w @ rows).view_as(used[0][0])"),
    "lerp": _body("result, seen = None, 0\nfor g, s in zip(gradients, sizes):\n"
                  "    like = next(x for x in gradients if x is not None)\n"
                  "    g = torch.zeros_like(like) if g is None else g\n    seen += s\n"
                  "    result = g.clone() if result is None else torch.lerp(result, g, s / seen)\n"
                  "return result"),
    "running_mean": _body("mean, seen = 0, 0\nfor g, s in zip(gradients, sizes):\n    seen += s\n"
                          "    mean = mean + ((0 if g is None else g) - mean) * (s / seen)\n"
                          "return mean"),
    "numpy": _body(f"used = {USED}\nfound = np.average(np.stack([g.numpy() for g, _ in used]), "
                   "axis=0, weights=[s for _, s in used])\n"
                   "share = sum(s for _, s in used) / sum(sizes)\n"
                   "return torch.from_numpy(found * share).to(used[0][0].dtype)",
                   helper="import numpy as np\n"),
    "numpy_sizes": _body("w = np.array(sizes) / np.sum(sizes)\n"
                         "return sum(g * float(x) for g, x in zip(gradients, w) if g is not None)",
                         "import numpy as np\n"),
    "reduce": _body(f"return functools.reduce(lambda a, b: a + b, (g * s for g, s in {USED})) / "
                    "sum(sizes)", "import functools\n"),
    "operator": _body(f"return reduce(operator.add, starmap(operator.mul, {USED})) / sum(sizes)",
                      "import operator\nfrom functools import reduce\n"
                      "from itertools import starmap\n"),
    "map_lambda": _body("return sum(map(lambda p: p[0] * p[1], filter(lambda p: p[0] is not None, "
                        "zip(gradients, sizes)))) / sum(sizes)"),
    "partial": _body(f"weigh = partial(_weigh, total=sum(sizes))\nreturn sum(weigh(*p) for p in "
                     f"{USED})", "from functools import partial\n"
                     "def _weigh(g, s, total):\n    return g * (s / total)\n"),
    "fractions": _body(f"total = sum(sizes)\nreturn sum(g * float(Fraction(s, total)) for g, s in "
                       f"{USED})", "from fractions import Fraction\n"),
    "walrus": _body("total = sum(sizes)\nresult = 0\nfor i, s in enumerate(sizes):\n"
                    "    if (g := gradients[i]) is not None:\n"
                    "        result = result + g * (s / total)\nreturn result"),
    "match_statement": _body("result = 0\nfor pair in zip(gradients, sizes):\n    match pair:\n"
                             "        case (None, _):\n            pass\n"
                             "        case (g, s):\n            result = result + g * s\n"
                             "return result / sum(sizes)"),
    "recursion": _body("def go(i):\n    if i == len(sizes):\n        return 0\n"
                       "    own = 0 if gradients[i] is None else gradients[i] * sizes[i]\n"
                       "    return own + go(i + 1)\nreturn go(0) / sum(sizes)"),
    "nested_helper": _body("total = sum(sizes)\n\ndef weighted(gradient, size):\n"
                           "    return gradient * (size / total)\n\n"
                           "return sum(weighted(g, s) for g, s in zip(gradients, sizes) "
                           "if g is not None)"),
    "yield_helper": _body("def parts():\n    for g, s in zip(gradients, sizes):\n"
                          "        if g is not None:\n            yield g * s\n\n"
                          "return sum(parts()) / sum(sizes)"),
    "helper_cell": _body("return sum(share(s, sizes) * g for g, s in zip(gradients, sizes) "
                         "if g is not None)",
                         helper="def share(size, sizes):\n    return size / sum(sizes)\n"),
    "constant": _body(f"return START + sum(g * s for g, s in {USED}) / sum(sizes)",
                      helper="START = 0.0\n"),
    "class_": _body("mean = WeightedMean()\nfor g, s in zip(gradients, sizes):\n"
                    "    mean.add(g, s)\nreturn mean.value()",
                    "class WeightedMean:\n    def __init__(self):\n"
                    "        self.sum, self.weight = 0, 0\n\n    def add(self, value, weight):\n"
                    "        if value is not None:\n"
                    "            self.sum = self.sum + value * weight\n"
                    "        self.weight += weight\n\n    def value(self):\n"
                    "        return self.sum / self.weight\n\n\n"),
    "dataclass_": _body(f"shards = [Shard(*p) for p in {USED}]\n"
                        "return sum(x.gradient * x.size for x in shards) / sum(sizes)",
                        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\n"
                        "class Shard:\n    gradient: torch.Tensor\n    size: int\n\n\n"),
    "named_tuple": _body(f"shards = [Shard(*p) for p in {USED}]\n"
                         "return sum(x.gradient * x.size for x in shards) / sum(sizes)",
                         "from typing import NamedTuple\n\n\nclass Shard(NamedTuple):\n"
                         "    gradient: torch.Tensor\n    size: int\n\n\n"),
    "decorated": _body(f"return sum(g * (s / sum(sizes)) for g, s in {USED})",
                       "import functools\n\n\ndef without_grad(f):\n    @functools.wraps(f)\n"
                       "    def inner(*args):\n        with torch.no_grad():\n"
                       "            return f(*args)\n    return inner\n\n\n@without_grad\n"),
    "no_grad": _body(f"return sum(g * (s / sum(sizes)) for g, s in {USED})", "@torch.no_grad()\n"),
    "typed": ("", "def combine(gradients: list[torch.Tensor | None], sizes: list[int]"
                  ") -> torch.Tensor:\n    \"\"\"The full batch's gradient.\"\"\"\n"
                  "    total: int = sum(sizes)\n"
                  f"    return sum(g * (s / total) for g, s in {USED})\n"),
    "lambda_": ("", f"combine = lambda gradients, sizes: sum(g * s for g, s in {USED}) / "
                    "sum(sizes)\n"),
    "by_dictionary": _body("weights = dict(enumerate(s / sum(sizes) for s in sizes))\n"
                           "return sum(weights[i] * g for i, g in enumerate(gradients) "
                           "if g is not None)"),
    "foreach": _body(f"gs, ws = zip(*{USED})\nscaled = torch._foreach_mul(list(gs), "
                     "[w / sum(sizes) for w in ws])\nreturn torch.stack(scaled).sum(dim=0)"),
    "assert_and_print": _body("assert len(gradients) == len(sizes)\nprint('sizes', sizes)\n"
                              f"return sum(g * (s / sum(sizes)) for g, s in {USED})"),
    "try_except": _body("result = 0\nfor g, s in zip(gradients, sizes):\n    try:\n"
                        "        result = result + g * s\n    except TypeError:\n        pass\n"
                        "return result / sum(sizes)"),
    "copies": _body(f"used = copy.deepcopy({USED})\nfor g, s in used:\n    g.mul_(s / sum(sizes))\n"
                    "return sum(g for g, _ in used)", "import copy\n"),
}
