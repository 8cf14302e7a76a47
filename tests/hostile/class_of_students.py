"""A class: forty honest submissions with right answers, some with wrong ones, and the hostile ones
among them."""

import json
from pathlib import Path

import on_the_check
import on_the_machine

ROOT = Path(__file__).resolve().parents[2]
HELPER = ("import numpy as np\nhalf = 0.5\ndef share(size, total):\n"
          "    return 2 * half * size / total\n")
USED = "[(g, s) for g, s in zip(gradients, sizes) if g is not None]"
RIGHT = [
    "def combine(gradients, sizes):\n    total = sum(sizes)\n"
    f"    return sum(g * (s / total) for g, s in {USED})\n",
    "def combine(gradients, sizes):\n    result = 0\n"
    f"    for g, s in {USED}:\n        result = result + g * s\n"
    "    return result / sum(sizes)\n",
    f"def combine(gradients, sizes):\n    used = {USED}\n"
    "    w = torch.tensor([s / sum(sizes) for _, s in used], dtype=used[0][0].dtype)\n"
    "    return torch.einsum('i,i...->...', w, torch.stack([g for g, _ in used]))\n",
    "def combine(gradients, sizes):\n"
    f"    used = {USED}\n    print('shapes', [g.shape for g, _ in used])\n"
    "    return sum(g * share(s, sum(sizes)) for g, s in used)\n",
    "from dataclasses import dataclass\nfrom collections import namedtuple\nimport copy, os, sys\n"
    "Shard = namedtuple('Shard', 'gradient size')\n@dataclass\nclass Sum:\n    value: float = 0.0\n"
    f"def combine(gradients, sizes):\n    shards = [Shard(*p) for p in {USED}]\n"
    "    total = Sum()\n    for shard in shards:\n"
    "        total.value = total.value + copy.deepcopy(shard.gradient) * shard.size\n"
    "    return total.value / sum(sizes)\n",
]
WRONG = {
    "plain_mean": "def combine(gradients, sizes):\n    return sum(gradients) / len(gradients)\n",
    "sum": "def combine(gradients, sizes):\n    return sum(gradients)\n",
    "raises": "def combine(gradients, sizes):\n    return gradients[99]\n",
    "no_python": "def combine(gradients, sizes:\n    return\n",
    "another_plain_mean": "def combine(g, sizes):\n    return torch.stack(g).mean(0)\n"}
ON_RANKS = ("def mean_over_ranks(mine):\n    everyone = mine.clone()\n"
            "    dist.all_reduce(everyone)\n    return everyone / dist.get_world_size()\n")


def notebook(answer: str, added: str = "") -> dict:
    """The student's notebook with this in the cell of its first exercise, and with cells of the
    student's own before and after it."""
    name, gap = (("00_start_here", "def mean_over_ranks") if "mean_over_ranks" in answer else
                 ("02_manual_ddp", "def combine"))
    found = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    number = next(number for number, cell in enumerate(found["cells"])
                  if cell["cell_type"] == "code" and gap in "".join(cell["source"]))
    found["cells"][number]["source"] = answer
    for source in filter(None, (added, "%timeit sum(range(10))\nnotes = 'mine'")):
        found["cells"].insert(number, {"cell_type": "code", "id": f"added-{len(source)}",
                                       "metadata": {}, "source": source, "outputs": [],
                                       "execution_count": None})
    return found


def hand_in(folder: Path) -> dict[str, dict[str, str]]:
    """Writes all submissions; returns kind ("right", "wrong", "hostile") -> student -> the words
    that its sentence must have."""
    hostile = on_the_check.SEEN | on_the_check.FOUND | on_the_machine.ATTACKS
    found = {"right": {}, "wrong": dict.fromkeys(WRONG, ""),
             "hostile": {name: words for name, (_, words) in hostile.items()}}
    written = {name: notebook(source) for name, (source, _) in hostile.items()}
    written |= {name: notebook(source) for name, source in WRONG.items()}
    for number in range(40):
        name = f"honest_{number:02d}"
        found["right"][name] = ""
        written[name] = (notebook(ON_RANKS) if number >= 38 else
                         notebook(RIGHT[number % len(RIGHT)], HELPER))
    for name, nb in written.items():
        (folder / f"{name}.ipynb").write_text(json.dumps(nb))
    return found
