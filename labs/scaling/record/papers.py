"""Notes on the papers of ZeRO and FSDP: a page with questions, where the answer stands, the
student's own numbers, and blank lines."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from labs.scaling.record.markdown import number_rows
from labs.scaling.record.session import Row, Session

MOST = 8  # numbers below a question
BLANK = "\n> \\_\\_\\_\n>\n> \\_\\_\\_\n"


@dataclass(frozen=True)
class Question:
    """where: in the paper. own: which of the student's numbers belong to it; how: to get one."""

    text: str
    where: str
    own: Callable[[Row], bool] = lambda row: False
    how: str = ""


def _about(*topics: str, name: str = "") -> Callable[[Row], bool]:
    """Rows of these topics whose name has a match of `name`."""
    return lambda row: row.topic in topics and bool(re.search(name, row.metric.name, re.IGNORECASE))


PAPERS = {
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. S. Rajbhandari et al., "
    "SC 2020, arXiv 1910.02054": [
        Question("Mixed-precision Adam keeps 16 bytes for each parameter. Which are they, and how "
                 "many of them does your own recipe keep?", "section 3.1",
                 _about("memory", name="parameter|gradient|optimizer|state|resident|step"),
                 "the memory picture of *Accelerate, Qwen2, DeepSpeed*"),
        Question("Stage 2 sends no more than plain data parallelism, and stage 3 sends 1.5 times "
                 "as much. Which collective replaces which, and where does the half come from?",
                 "section 7", _about("traffic", name="DDP|ZeRO|FSDP|HSDP|all.reduce"),
                 "`lab.show_training` and `lab.show_link_bytes`"),
        Question("Figure 3 shows a throughput that grows faster than the number of GPUs. What "
                 "grows with that number besides the computing power? Is it *your* efficiency?",
                 "section 10 and figure 3", _about("efficiency", name="scaling"),
                 "`lab.show_scaling`"),
        Question("ZeRO-R: which memory is not a model state, and which part of it does ZeRO-DP "
                 "leave as it is?", "sections 3.2 and 6", _about("memory", name="activ|peak"),
                 "the memory picture of *Accelerate, Qwen2, DeepSpeed*")],
    "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Y. Zhao et al., VLDB 2023, "
    "arXiv 2304.11277": [
        Question("Hybrid sharding keeps more of the parameters on each rank. What does it save, "
                 "and on which link?", "section 3.2.2",
                 _about("traffic", "throughput", "memory", name="HSDP|^FSDP|hierarchical|^flat"),
                 "`lab.show_hierarchical` and `lab.show_training`"),
        Question("How do backward and forward prefetching hide an all-gather, and what stays "
                 "exposed in your runs?", "section 3.3",
                 _about("throughput", name="exposed|healthy"), "`lab.show_lost_time`"),
        Question("Why can a CPU thread that runs ahead of the GPU cost memory, and what does the "
                 "rate limiter do? (A CPU run shows nothing of this.)", "section 3.4"),
        Question("How large is one FlatParameter, what does its padding cost, and what replaces "
                 "it in `fully_shard`?", "section 4"),
        Question("TFLOP/s per GPU are reported for models of several sizes. What share of the "
                 "peak is that, and what is yours?", "section 5",
                 _about("efficiency", "throughput", name="MFU|HFU|FLOP|utili|tokens"),
                 "`lab.show_utilization`"),
        Question("For which optimizers is sharded training not equal to training without "
                 "sharding?", "section 7")]}


def page(session: Session) -> str:
    """The page as Markdown: the student's own numbers below the questions that they belong to."""
    lines = ["# Notes on two papers", "",
             "Read the section, answer in a sentence or two, and compare with your own numbers: "
             "they are filled in where this session has measured some."]
    for title, questions in PAPERS.items():
        lines += ["", f"## {title}"]
        for number, question in enumerate(questions, 1):
            lines += ["", f"**{number}. {question.text}** ({question.where})", BLANK,
                      *_own_numbers(question, session)]
    return "\n".join(lines) + "\n"


def _own_numbers(question, session) -> list[str]:
    rows = [row for row in session.rows if question.own(row) and not row.recorded]
    if rows:
        more = [f"… and {len(rows) - MOST} more in numbers.json."] * (len(rows) > MOST)
        return ["Your numbers:", "", *number_rows(rows[:MOST]), "", *more]
    return [f"Your number: \\_\\_\\_ (not measured in this session: {question.how})"
            ] if question.how else []
