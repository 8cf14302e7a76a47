# %% [markdown]
# # 00 · Start here
#
# | | |
# |:--|:--|
# | **Time** | 45 minutes, and 20 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU |
#
# Llama 3 was trained by 16,384 processes at once; one that waits for the wrong thing stops all. Here
# you run 2 to 8 of them from a cell.

# %% [markdown]
# *On one GPU* several ranks share it, through gloo: NCCL before 2.30 refuses that, and from 2.30 on
# it needs `NCCL_MULTI_RANK_GPU_ENABLE=1`. Each rank holds what it would hold on a node.
# gloo cannot send from a GPU, so there the ring runs on the CPU.

# %% [markdown]
# ## You will be able to
#
# - run a function on any number of ranks and read what each one did;
# - say, for five collectives, who holds what before and after;
# - build all-reduce from two of them, and count the bytes it moves;
# - distinguish a failed rank from a deadlock, and find the line that caused it.
#
# Run a cell with Shift+Enter. Where you see `# your code here`, it is your turn.

# %% [markdown]
# ## This machine

# %%
import time

import torch
import torch.distributed as dist

import labs
import labs.start_here as lab
from labs import launch

machine = labs.machine()
machine

# %% [markdown]
# Everything in this workbook runs on *real ranks*. A **rank** is one process of a group of N,
# numbered from 0. On a node with GPUs each rank gets a GPU of its own, and **NCCL**, NVIDIA's
# library for communication, carries the data. Between CPUs **gloo**, Meta's library, does.
#
# The picture shows the ranks of a launch that asks for no number. We ask for at least four, so that
# there is something to see; two cores are enough.

# %%
RANKS = max(4, machine.ranks)  # any number from 2 to 8 will do

# %% [markdown]
# ## The first launch
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `launch(function, ranks=N)` | a list: entry r is what rank r returned | until all ranks are done |
# | `dist.get_rank()` | this rank's number, from 0 | no |
# | `dist.get_world_size()` | the number of ranks, N | no |
#
# Inside `launch` the **process group** is up: the ranks know one another and can communicate. When
# torch says "Default process group has not been initialized", a function that needs `launch` was
# called without it.

# %%
def hello():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    print(f"I am one of {ranks}, and I compute on {labs.device()}")
    return 10 * rank


launch(hello, ranks=RANKS)

# %% [markdown]
# The same code ran on every rank; only `dist.get_rank()` differed. And ranks share no memory: each
# gets a copy of what the function uses, and what it changes stays with it. What does `notes` hold
# here, after four ranks have written into it?

# %% tags=["nbval-check-output"]
notes = []


def write_down():
    notes.append(dist.get_rank())
    return notes


print("on the ranks:", launch(write_down, ranks=4))
print("here:        ", notes)

# %% [markdown]
# Here `notes` is still empty. To learn what another rank holds, a rank must *communicate*. In
# data-parallel training nearly all communication is **collective**: every rank of the group takes
# part in the same call.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(x)` | None; `x` is now the sum of all ranks' `x` | until the sum is there |

# %%
def sum_of_ranks():
    x = torch.tensor([float(dist.get_rank())], device=labs.device())
    returned = dist.all_reduce(x)  # writes into x
    return returned, x.item()


launch(sum_of_ranks, ranks=4)

# %% [markdown]
# ## Guess, then run, then look
#
# Before most runs you write a guess down; the picture compares it with what happened. A wrong guess
# that you can see teaches more than a right one you never made.
#
# Ranks 0, 1, 2 and 3 hold 1, 4, 9 and 16. What is their mean?

# %%
# A guess, for exercise 0.1: put a number in place of the dots
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION

labs.guess("0.1", "the mean over ranks", my_guess)

# %% [markdown]
# ### Exercise 0.1 · The mean over ranks
#
# *Difficulty 1 of 5 · 5 minutes · target: the mean on each of 2, 3 and 4 ranks, `mine` unchanged*
#
# Data-parallel training averages gradients over ranks, so this function is its core. Every rank must
# return the mean of all ranks' `mine`, in the dtype of `mine`. The caller still needs `mine`: leave
# it unchanged.

# %%
# Exercise 0.1: the mean over ranks
def mean_over_ranks(mine):
    """The mean of all ranks' tensors, on every rank; `mine` stays unchanged."""
    ### BEGIN SOLUTION
    everyone = mine.clone()
    dist.all_reduce(everyone)
    return everyone / dist.get_world_size()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
lab.check_mean_over_ranks(mean_over_ranks)

# %%
lab.before_and_after_mean(mean_over_ranks, ranks=4)

# %% [markdown]
# **Notice:** every rank holds the same number afterwards. The check ran your function on 2, 3 and 4
# ranks and compared each rank's result with the true mean. If an answer is wrong, the check says
# which rank broke which rule. Try it: leave the division out.
#
# Checks run quietly: of prints they show only those of a rank that fails. To see all that your
# function prints, launch it: `launch(mean_over_ranks, torch.ones(2), ranks=2)`.

# %% [markdown]
# ## Who holds what
#
# Five collectives carry all traffic of this workbook. Every picture below comes from a real run. A
# row is a rank, a column a piece of its tensor, a colour the rank that a number came from. Of four
# ranks, rank 0 starts with 1000, 2000, …, rank 1 with 100, 200, …. So the digits of a sum tell who
# gave what: 2222 is everybody's piece 1.

# %%
def broadcast(mine):
    dist.broadcast(mine, src=0)
    return mine


lab.who_holds_what(broadcast, ranks=RANKS)

# %% [markdown]
# **Broadcast**: rank 0's tensor overwrites everybody's. This is how all ranks begin with the same
# parameters.

# %%
def all_reduce(mine):
    dist.all_reduce(mine)
    return mine


lab.who_holds_what(all_reduce, ranks=RANKS)

# %% [markdown]
# **All-reduce**: everybody gets the sum of everything. A cell has a stripe for every rank that is
# in its number. This is the gradient step of **DDP**, distributed data parallel: every rank holds
# the whole model and trains it on its own share of each batch.

# %%
def all_gather(mine):  # each rank begins with one piece, its shard: here, one number
    everything = mine.new_empty(dist.get_world_size())
    dist.all_gather_single(everything, mine)
    return everything


lab.who_holds_what(all_gather, ranks=RANKS, begin="shard")

# %% [markdown]
# **All-gather**: each rank owns a **shard**, its piece of a tensor that was cut up; afterwards
# everybody has the whole. Nothing was added: one colour per column. **FSDP**, fully sharded data
# parallel, does this to a layer's parameters just before it needs them. Mind the order of the
# arguments: *(output, input)*.
#
# Now predict. **Reduce-scatter** sums like all-reduce, but piece r of the sum goes to rank r alone.
# With four ranks, which number will rank 2 hold?

# %%
# A guess, before exercise 0.2: the number that rank 2 will hold
### BEGIN SOLUTION
my_guess = 2222
### END SOLUTION

labs.guess("0.2", "the number that rank 2 will hold", my_guess)

# %%
def reduce_scatter(mine):
    piece = torch.empty_like(mine[:1])  # one number: here, that is a piece
    dist.reduce_scatter_single(piece, mine)
    return piece


lab.who_holds_what(reduce_scatter, ranks=4, guess="0.2")

# %% [markdown]
# Ranks, like pieces, count from 0. Each rank holds 1/N of the sum: this is how FSDP and **ZeRO**,
# the zero redundancy optimizer, shard gradients.
#
# The last one sums nothing. **All-to-all**: piece r of every rank goes to rank r. The picture is
# turned over its diagonal, like a transposed matrix. Mixture-of-experts layers use it.

# %%
def all_to_all(mine):
    arrived = torch.empty_like(mine)
    dist.all_to_all_single(arrived, mine)
    return arrived


lab.who_holds_what(all_to_all, ranks=RANKS)

# %% [markdown]
# ### Exercise 0.2 · All-reduce from two halves
#
# *Difficulty 2 of 5 · 10 minutes · target: one reduce-scatter, one all-gather, no all-reduce*
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.reduce_scatter_single(piece, whole)` | None; writes `piece` | yes |
# | `dist.all_gather_single(whole, piece)` | None; writes `whole` | yes |
# | `mine.new_empty(n)` | n numbers of the dtype of `mine` | no |
#
# Before torch 2.13 they were `dist.reduce_scatter_tensor` and `dist.all_gather_into_tensor`.
#
# What reduce-scatter leaves is what all-gather starts from, so build all-reduce from both. `mine`
# has any dtype; its length is a multiple of the number of ranks.

# %%
# Exercise 0.2: all-reduce from reduce-scatter and all-gather
def all_reduce_in_two(mine):
    """The sum of all ranks' `mine`, on every rank, in its dtype. `mine` may be overwritten."""
    ### BEGIN SOLUTION
    shard = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    whole = torch.empty_like(mine)
    dist.all_gather_single(whole, shard)
    return whole
    ### END SOLUTION


# %% tags=["nbval-check-output"]
lab.check_all_reduce(all_reduce_in_two)

# %%
lab.two_steps(all_reduce_in_two, ranks=RANKS)

# %% [markdown]
# **Notice:** in the middle each rank holds one piece of the sum, and nobody holds two. The whole
# workbook builds on this identity: **all-reduce = reduce-scatter + all-gather**. DDP does both at
# once; ZeRO stops after the first half, updates its shard, and only then gathers. Both move the
# same bytes, but ZeRO needs less memory.

# %% [markdown]
# ## What it costs: the ring
#
# The gradients of a 7B model are 14 GB in 16 bits. A rank that sent them to 7 others would
# send 98 GB in each step. How is a collective made? Put the ranks in a ring; each sends to
# the next. Cut the tensor into N pieces. In each step a rank passes *one piece* on: first it
# *adds* what arrives, until each rank has a finished piece; then it *copies*.

# %%
def ring_all_reduce(mine):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = mine.chunk(ranks)
    arriving = torch.empty_like(pieces[0])
    for step in range(2 * (ranks - 1)):
        leaving = pieces[(rank - step) % ranks]
        place = pieces[(rank - step - 1) % ranks]
        lab.pass_on(leaving, arriving)  # send to the next rank, receive from the one before
        if step < ranks - 1:
            place += arriving
        else:
            place.copy_(arriving)
    return mine


lab.ring_steps(ring_all_reduce, ranks=4)

# %% [markdown]
# **Notice:** the dark frames are what just arrived: one piece per rank and step, so every link of
# the ring is busy all the time. After step 3 each rank holds one complete sum: that was the
# reduce-scatter, shifted by one, since rank 0 holds piece 1.
#
# Now guess: four ranks all-reduce a tensor of 12 MB. How many MB does *each* rank send?

# %%
# A guess, for exercise 0.3: the MB that each rank sends
### BEGIN SOLUTION
my_guess = 24
### END SOLUTION

labs.guess("0.3", "MB sent by each of 4 ranks", my_guess)

# %% [markdown]
# ### Exercise 0.3 · The bytes of a ring
#
# *Difficulty 2 of 5 · 5 minutes · target: the bytes that rings of 2, 3 and 4 ranks send*
#
# Write the formula for any size and any number of ranks: how many steps, and how many bytes leave a
# rank in each? The check does not know the answer either: it runs rings on 2, 3 and 4 ranks and
# counts the bytes given to `send`.

# %%
# Exercise 0.3: the bytes of a ring
def ring_bytes(size, ranks):
    """Bytes that each rank sends while a ring of `ranks` all-reduces `size` bytes."""
    ### BEGIN SOLUTION
    steps = 2 * (ranks - 1)
    return steps * size / ranks
    ### END SOLUTION


# %% tags=["nbval-check-output"]
lab.check_ring_bytes(ring_bytes)

# %%
lab.ring_traffic(ring_bytes)

# %% [markdown]
# **Notice:** the bars grow, but none reaches twice the tensor, the dashed line, however many ranks
# there are. No algorithm made of sends and receives needs fewer bytes (Patarasuk and Yuan, 2009). On
# a CPU, bytes and calls are true, seconds are not: this notebook measures no time.

# %% [markdown]
# ## When a rank fails
#
# In Llama 3's training something failed 419 times in 54 days, so about every three hours. When one
# rank raises an exception, the others know nothing of it: they wait in their next collective for a
# rank that will never come. `launch` stops them all and shows the root cause first, with the cell
# and the line. `lab.diagnose` draws what `launch` would raise.

# %%
def share_the_work():
    if dist.get_rank() == 0:
        time.sleep(1)  # it reads a file, say: meanwhile the others reach their collective
    batches = 12 // dist.get_rank()
    total = torch.tensor(batches, device=labs.device())
    dist.all_reduce(total)
    return total.item()


lab.diagnose(share_the_work, ranks=RANKS)

# %% [markdown]
# **Notice:** rank 0 is to blame: 12 // 0. The others did nothing wrong, they wait. Read the first
# line of a failure first, and look for your own line in it.

# %% [markdown]
# ## A deadlock, on purpose
#
# Worse than an exception is silence. On the CPU torch waits for 30 minutes before it gives up, and
# then it does not say for whom. Below, rank r has r + 2 batches, as happens when data does not
# divide evenly, and the ranks average their loss after every batch. One of them leaves early, and
# the others wait for it. Which rank will be missing?

# %%
# A guess, for exercise 0.4: the number of the missing rank
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION

labs.guess("0.4", "the missing rank", my_guess)

# %%
def mean_losses(losses):
    means = []
    for loss in losses:
        total = torch.tensor(loss, device=labs.device())
        dist.all_reduce(total)
        means.append(total.item() / dist.get_world_size())
    return means


def train_unevenly():
    batches = 2 + dist.get_rank()
    return mean_losses([1.0] * batches)


lab.diagnose(train_unevenly, ranks=RANKS, guess="0.4")

# %% [markdown]
# **Notice:** read it from left to right. All ranks finished all-reduce #1 and #2, then rank 0 ran out
# of batches and returned, and the others stand in #3, at the line shown. So the question is always:
# *which rank is missing, and where did it go?* `launch` found the hang within seconds.

# %% [markdown]
# ### Exercise 0.4 · Repair it
#
# *Difficulty 2 of 5 · 10 minutes · target: a list of means, as long as the shortest rank's losses*
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(x, op=dist.ReduceOp.MIN)` | None; `x` is now the smallest of all | yes |
# | `mean_losses(losses)` | a list: each step's mean over ranks | yes |
#
# Make the ranks stop together: after as many steps as the rank with the *fewest* batches has. No
# rank knows that number by itself. `mean_losses` is fine as it is.

# %%
def smallest_rank():
    x = torch.tensor(dist.get_rank() + 5, device=labs.device())
    dist.all_reduce(x, op=dist.ReduceOp.MIN)
    return x.item()


launch(smallest_rank, ranks=RANKS)

# %%
# Exercise 0.4: stop together
def mean_losses_together(losses):
    """The mean over ranks of each step's loss; as many steps as every rank can take."""
    ### BEGIN SOLUTION
    steps = torch.tensor(len(losses), device=labs.device())
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    return mean_losses(losses[: steps.item()])
    ### END SOLUTION


# %% tags=["nbval-check-output"]
lab.check_mean_losses(mean_losses_together)

# %% [markdown]
# Trainers that do not know how many batches will come ask before each step: every rank all-reduces
# a flag, 1 for "I have data", and all stop as soon as one has none. The check accepts that too.
#
# There is a second way to miss each other: everybody comes, but to different places. Here rank 1
# broadcasts while the others all-reduce. `launch` compares what ranks call, and says so at once.

# %%
def different_places():
    total = torch.ones(1, device=labs.device())
    if dist.get_rank() == 1:
        dist.broadcast(total, src=1)
    else:
        dist.all_reduce(total)


lab.diagnose(different_places, ranks=RANKS)

# %% [markdown]
# ## Optional: without launch
#
# On a node without this workbook, your own script starts its ranks. torch starts fresh Python
# processes, and each of them imports your script again. So `work` must stand in a file, not in a
# cell, and without the line with `__name__` each rank would start ranks, too.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `mp.spawn(work, args=(a, b), nprocs=N)` | None; calls `work(rank, a, b)` in N processes, raises where one raises | until all have ended |

# %%
HEAD = """
import sys, tempfile, torch
import torch.distributed as dist
import torch.multiprocessing as mp
N = int(sys.argv[1])  # `python script.py 2` starts 2 ranks
"""
hello = HEAD + """
def work(rank, word):
    print(word, "from rank", rank, "of", N)

if __name__ == "__main__":
    mp.spawn(work, args=("hello",), nprocs=N)
"""
lab.run_script(hello, ranks=2)

# %% [markdown]
# Nothing connects these processes yet. They must *meet*, at a place that all of them know: a file
# that does not exist yet, or a port at which nobody else listens.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.init_process_group("gloo", init_method="file:///tmp/x", rank=r, world_size=N)` | None | until N ranks have met |
# | `dist.destroy_process_group()` | None; the group's end | no |
# | `tempfile.TemporaryDirectory()` | for `with`: the path of a new folder, removed at the end | no |

# %% [markdown]
# ### Exercise 0.5 · Without launch
#
# *Difficulty 3 of 5 · 20 minutes · target: the right sum, an exit code that is true, nothing left*
#
# Rank r seeds torch with r and draws `torch.rand(1)`. Rank 0 prints the sum over ranks,
# on a line of its own. Two runs may overlap in time. Where a rank raises, the exit code is
# not 0. The check runs the script on 2, 3 and 2 ranks; all import torch, which takes a while.

# %%
# Exercise 0.5: a script that starts its own ranks
### BEGIN SOLUTION
script = HEAD + """
def work(rank, folder):
    place = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=N)
    drawn = torch.rand(1, generator=torch.manual_seed(rank))
    dist.all_reduce(drawn)
    if rank == 0:
        print(drawn.item())
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder,), nprocs=N)
"""
### END SOLUTION

# %%
lab.check_script(script)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Idea: take `hello` and replace its word by the place where the ranks meet.
#
# Outline: the script begins with `HEAD`, as `hello` does. Below the line with `__name__`, make a folder, and start the
# ranks while it exists. In `work`: meet, seed, draw, sum, print on one rank only, end the group. Do
# not catch exceptions: `mp.spawn` ends the other ranks and raises, and Python makes exit code 1 of it.
#
# </details>

# %% [markdown]
# **Notice:** `launch` does all this in each cell, and more: it sends functions of a cell to the ranks,
# starts them without a new import of torch, and finds deadlocks. `torchrun` is the same for a node:
# it starts the processes and passes rank, world size and the place to meet in environment variables.

# %% [markdown]
# ## I can …
#
# - run a function on N ranks, and say what they share (nothing)
# - draw who holds what before and after five collectives
# - build all-reduce from two halves
# - compute what a ring all-reduce of S bytes makes each of N ranks send
# - read a diagnosis: who waits, where, for whom

# %% [markdown]
# ## How it usually goes wrong
#
# - **`if rank == 0:` around a collective**, to log a loss, say: rank 0 waits alone. Call it on
#   all ranks, print on one.
# - **Uneven data**: as above.
# - **`all_reduce` overwrites** its argument; keep a clone.
# - **A sum where a mean was meant**: it still trains, with gradients N times too large.
# - **`isend` and `irecv` one after the other**: gloo lets it pass, NCCL can hang. Issue them together
#   with `dist.batch_isend_irecv`.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [Bandwidth optimal all-reduce](https://doi.org/10.1016/j.jpdc.2008.09.002) | P. Patarasuk, X. Yuan, JPDC 2009 | Why can no rank send less? |
# | [NCCL tests, performance](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md) | NVIDIA | Why multiply "algbw" by 2(N−1)/N? What becomes comparable? |
# | [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html) | PyTorch | Which collectives of this notebook have an `async_op`, and what may you not touch until `wait`? |

# %% [markdown]
# ## What comes next
#
# Notebook 01, Memory math, asks why one GPU is not enough: where every byte of training goes.
# Notebook 02, Manual DDP, turns your `mean_over_ranks` into data-parallel training that keeps up
# with PyTorch's own.
