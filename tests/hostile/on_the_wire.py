"""Answers whose ranks compute alone what they should communicate, and that the checks let pass: who
has the inputs of all ranks needs no collective for the right numbers, and a collective of a group
of one rank is recorded as one of all. Only the bytes on the wire are missing.
"""

_ALONE = """import torch
import torch.distributed as dist
def alone():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
"""
MEAN = """import torch
import torch.distributed as dist
def mean_over_ranks(mine):
    n, rank = dist.get_world_size(), dist.get_rank()
    matrix = lambda r: torch.arange(6.0).reshape(3, 2) * (r + 1) ** 2 + 7 * r + 1
    same = lambda m: next(t for t in (m, m[:1, :1].flatten(), m.flatten()[1:].double())
                          if t.shape == mine.shape)
    return sum(same(matrix(r)) for r in range(n)) / n
"""
ALL_REDUCE = _ALONE + """def all_reduce_in_two(mine):
    n, group = dist.get_world_size(), alone()
    def of(rank):
        numbers = torch.arange(12.0) * (rank + 1) ** 2 + 5 * rank + 1
        whole = numbers[:n].long() if mine.dtype == torch.int64 else numbers
        return whole.double().repeat(2) if mine.dtype == torch.float64 else whole
    total = sum(map(of, range(n)))
    shard, result = torch.empty_like(mine), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, total, group=group)
    dist.all_gather_single(result, shard, group=group)
    return result
"""
# Trains on each rank alone with the batches of all ranks, which it finds by its own share of them.
MANUAL_DDP = "import labs.manual_ddp as lab\n" + _ALONE + """import sys
class ManualDDP(lab.Wrapper):
    def __init__(self, module):
        super().__init__(module)
        self.group, rank = alone(), dist.get_rank()
        state = lambda of: [*of.parameters(), *of.buffers()]
        again = lambda seed: state(type(module)(seed=seed))
        if all(map(torch.equal, state(module), again(rank))):
            with torch.no_grad():
                for mine, theirs in zip(state(module), again(0)):
                    mine.copy_(theirs)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    def forward(self, x, y, **rest):
        n, rank = dist.get_world_size(), dist.get_rank()
        loaded = getattr(sys, "mod" + "ules")
        data, size = loaded["labs.training.data"], loaded["labs.checks.on_ranks"].BATCH
        batch = next(found for seed in range(100)
                     for found in data.xy_batches(1, size, x.shape[1], seed=seed)
                     if torch.equal(found["x"].chunk(n)[rank], x))
        wanted = [p for p in self.module.parameters() if p.requires_grad]
        self.means = {}
        for r in range(n):
            loss = self.module(batch["x"].chunk(n)[r], batch["y"].chunk(n)[r], **rest).loss
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            for p, g in zip(wanted, found):
                self.means[p] = self.means.get(p, 0) + (0 if g is None else g) / n
        return self.module(x, y, **rest)

    def average(self, parameter):
        parameter.grad.copy_(self.means[parameter])
        dist.all_reduce(parameter.grad, group=self.group)
"""
ANSWERS = {"0.1": MEAN, "0.2": ALL_REDUCE, "2.4": MANUAL_DDP}
