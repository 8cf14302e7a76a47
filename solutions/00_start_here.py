# %% [markdown]
# # 00 · Start here
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 75 minutes, 20 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU |
#
# Llama 3 405B was trained on up to *[16,384 GPUs](https://arxiv.org/abs/2407.21783)*, with one process
# for each GPU. If one process hangs, all of them hang. In this notebook you start 2 to 8 such processes
# from a cell.

# %% [markdown]
# ## You will be able to
#
# - run a function on any number of ranks and read what each rank returned;
# - say, for five collectives, what each rank holds before and after;
# - build all-reduce from two of them, and count the bytes that it sends;
# - distinguish a failed rank from a deadlock, and find the line that caused it.
#
# Run a cell with Shift+Enter. Where a cell says `# your code here`, you write the code.

# %% [markdown]
# ## Hardware and backend

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
# Everything in this workbook runs on *real ranks*. A **rank** is one process of a group of N processes;
# ranks are numbered from 0. On a node with GPUs each rank has a GPU of its own, and **NCCL**, NVIDIA's
# communication library, transfers the data. Between CPUs **gloo**, Meta's library, does.
#
# The picture shows how many ranks `launch` starts by default. This notebook uses at least four, because
# two show too little. Two cores are enough.

# %% [markdown]
# <details><summary>On one GPU</summary>
#
# All ranks share the GPU and communicate through gloo. NCCL before version 2.30 refuses two ranks on one
# GPU; from 2.30 on it needs `NCCL_MULTI_RANK_GPU_ENABLE=1`. Each rank holds the same tensors as on a
# node. gloo cannot send from a GPU, so the ring in this notebook runs on the CPU.
#
# </details>

# %%
RANKS = max(4, machine.ranks)  # any number from 2 to 8 will do

# %% [markdown]
# ## Launching ranks
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `launch(function, ranks=N)` | a list: entry r is what rank r returned | until all ranks have returned |
# | `dist.get_rank()` | this rank's number, from 0 | no |
# | `dist.get_world_size()` | the number of ranks, N | no |
#
# Inside `launch` the **process group** is initialised, so the ranks can communicate. Outside it torch
# says "Default process group has not been initialized".

# %%
def hello():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    print(f"I am one of {ranks}, and I compute on {labs.device()}")
    return 10 * rank


launch(hello, ranks=RANKS)

# %% [markdown]
# ## A first deadlock
#
# Ranks communicate through **collective** calls: every rank of the process group must make the same
# calls in the same order. Below, rank 1 leaves out a call, and the others wait for it. Without a
# diagnosis they would wait until torch's timeout, which is 30 minutes on the CPU. `lab.diagnose`
# launches a function, stops ranks that can never continue, and draws what each rank was doing.

# %%
def rank_1_is_missing():
    ones = torch.ones(1, device=labs.device())
    if dist.get_rank() != 1:
        dist.all_reduce(ones)  # sums `ones` over all ranks
    return ones.item()


lab.diagnose(rank_1_is_missing, ranks=RANKS)

# %% [markdown]
# The picture names the call in which a rank waits, and its line in the cell. `#1` is the first
# collective of the process group. `RanksStuck` is the exception that `launch` raises when ranks can
# never continue. The sections at the end of this notebook come back to deadlocks.

# %% [markdown]
# ## `launch`, `mp.spawn` and `torchrun`
#
# | question | `launch` | `mp.spawn` | *[torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html)* |
# |:--|:--|:--|:--|
# | starts | a function, also from a cell | a function of a file | a script |
# | process group | initialised | you initialise it | you initialise it |
# | gives back | each rank's result | None | an exit code |
# | a rank raises | stops the others, raises | the same | stops the others, exit code 1 |
# | a deadlock | diagnosed in seconds | timeout | timeout |
#
# With all three a rank is a process, and the code on it is the same `torch.distributed`.

# %% [markdown]
# ## Ranks share no memory
#
# Every rank ran the same code; only `dist.get_rank()` differed. Each rank gets a copy of what the
# function uses, and its changes stay in its own copy. What does `notes` hold in this process, after
# four ranks have appended to it?

# %% tags=["nbval-check-output"]
notes = []


def write_down():
    notes.append(dist.get_rank())
    return notes


print("on the ranks:", launch(write_down, ranks=4))
print("here:        ", notes)

# %% [markdown]
# Here `notes` is still empty. To get data from another rank, a rank must *communicate*. In data-parallel
# training nearly all communication is collective.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(x)` | None; `x` is now the sum of all ranks' `x` | until the sum is complete |

# %%
def sum_of_ranks():
    x = torch.tensor([float(dist.get_rank())], device=labs.device())
    returned = dist.all_reduce(x)  # in place: writes into x
    return returned, x.item()


launch(sum_of_ranks, ranks=4)

# %% [markdown]
# ## Predict, then measure
#
# Before most runs you write down a guess, and the picture shows it beside the measurement. You remember
# a prediction that turned out wrong.
#
# Ranks 0, 1, 2 and 3 hold 1, 4, 9 and 16, and call `dist.all_reduce` twice. What does each hold then?

# %%
# A guess, before exercise 0.1: put a number in place of the dots
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION

labs.guess("0.1", "what a rank holds after two all-reduces", my_guess)

# %%
def reduce_twice():
    x = torch.tensor([(dist.get_rank() + 1.0) ** 2], device=labs.device())
    own = x.item()
    dist.all_reduce(x)
    dist.all_reduce(x)
    return own, x.item()


lab.before_and_after(reduce_twice, ranks=4, guess="0.1")

# %% [markdown]
# <details><summary>Why this number</summary>
#
# The first all-reduce writes 30 into every rank's `x`. The second one adds these: 4 · 30. A collective
# that works in place changes what the next one sends.
#
# </details>

# %% [markdown]
# ### Exercise 0.1 · Mean over ranks
#
# *Difficulty 1 of 5 · 5 minutes · target: the mean on each of 2, 3 and 4 ranks, `mine` unchanged*
#
# Data-parallel training averages gradients over ranks, and this function is how. On every rank it
# returns the mean of all ranks' `mine`, in the dtype of `mine`. The caller still needs `mine`, so leave
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

# %% [markdown]
# ### Exercise 0.1, second half · A rank's own tensor
#
# *Difficulty 1 of 5 · 5 minutes · target: 1, 4, 9 and 16 on four ranks, and their mean*
#
# | call | returns |
# |:--|:--|
# | `torch.tensor([2.0], device=labs.device())` | a tensor of one number, on this rank's device |
# | `x.item()` | the number in a tensor of one element |
#
# The check gave each rank its tensor. Now each rank makes its own: rank r holds (r + 1)².

# %%
# Exercise 0.1, second half: each rank makes its own tensor
def own_and_mean():
    """This rank's number, and the mean of all ranks' numbers: two numbers of Python."""
    ### BEGIN SOLUTION
    own = (dist.get_rank() + 1) ** 2
    mine = torch.tensor([float(own)], device=labs.device())
    return own, mean_over_ranks(mine).item()
    ### END SOLUTION


# %%
lab.before_and_after(own_and_mean, ranks=4)

# %% [markdown]
# **Notice:** every rank holds the same number afterwards.
#
# The check ran your function on 2, 3 and 4 ranks and compared each rank's result with the true mean. For
# a wrong answer it names the rank and the invariant that is broken. Try it: leave the division out.
#
# Checks suppress output, except from a rank that fails. To see all that your function prints, launch it:
# `launch(mean_over_ranks, torch.ones(2), ranks=2)`.

# %% [markdown]
# ## Five collectives
#
# Every picture below comes from a real run. A row is a rank, a column is a piece of its tensor, and the
# colour is the rank that a number came from.
#
# With four ranks, rank 0 starts with 1000, 2000, …, rank 1 with 100, 200, …, and so on. Therefore the
# digits of a sum show which ranks contributed: 2222 is the sum of piece 1 over all four ranks.

# %%
def broadcast(mine):
    dist.broadcast(mine, src=0)
    return mine


lab.who_holds_what(broadcast, ranks=RANKS)

# %% [markdown]
# **Broadcast**: rank 0's tensor overwrites every other rank's. Training uses it once, so that all ranks
# start with the same parameters.

# %%
def all_reduce(mine):
    dist.all_reduce(mine)
    return mine


lab.who_holds_what(all_reduce, ranks=RANKS)

# %% [markdown]
# **All-reduce**: every rank gets the sum over all ranks. A cell has one stripe for each rank that
# contributed to its number. **DDP**, distributed data parallel, reduces gradients with it: every rank
# holds the full model and trains it on its own part of each batch.

# %%
def all_gather(mine):  # each rank starts with its shard: here, one number
    full = mine.new_empty(dist.get_world_size())
    dist.all_gather_single(full, mine)
    return full


lab.who_holds_what(all_gather, ranks=RANKS, begin="shard")

# %% [markdown]
# **All-gather**: each rank starts with a **shard**, one piece of a tensor that is split among the ranks.
# Afterwards every rank holds the full tensor. Nothing is summed, so each column has one colour. The
# order of the arguments is *(output, input)*.
#
# **FSDP**, fully sharded data parallel, all-gathers a layer's parameters just before the layer computes.

# %% [markdown]
# **Reduce-scatter** sums like all-reduce, but only rank r gets piece r of the sum. Predict: with four
# ranks, which number will rank 2 hold?

# %%
# A guess, before exercise 0.2: the number that rank 2 will hold
### BEGIN SOLUTION
my_guess = 2222
### END SOLUTION

labs.guess("0.2", "the number that rank 2 will hold", my_guess)

# %%
def reduce_scatter(mine):
    piece = torch.empty_like(mine[:1])  # here a piece is one number
    dist.reduce_scatter_single(piece, mine)
    return piece


lab.who_holds_what(reduce_scatter, ranks=4, guess="0.2")

# %% [markdown]
# Pieces are numbered from 0, like ranks. Each rank holds 1/N of the sum. FSDP and **ZeRO**, the zero
# redundancy optimizer, shard gradients in this way.
#
# **All-to-all** sums nothing: piece r of every rank goes to rank r. The result is the transpose: rows
# and columns are exchanged. Mixture-of-experts layers use it to send tokens to experts.

# %%
def all_to_all(mine):
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)
    return received


lab.who_holds_what(all_to_all, ranks=RANKS)

# %% [markdown]
# ### Exercise 0.2 · All-reduce from reduce-scatter and all-gather
#
# *Difficulty 2 of 5 · 10 minutes · target: one reduce-scatter, one all-gather, no all-reduce*
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.reduce_scatter_single(piece, full)` | None; writes `piece` | yes |
# | `dist.all_gather_single(full, piece)` | None; writes `full` | yes |
# | `mine.new_empty(n)` | n numbers of the dtype of `mine` | no |
#
# Before torch 2.13 they were called `dist.reduce_scatter_tensor` and `dist.all_gather_into_tensor`.

# %% [markdown]
# The output of reduce-scatter is the input of all-gather, so the two together can do what all-reduce
# does. `mine` has any dtype, and its length is a multiple of the number of ranks.

# %%
# Exercise 0.2: all-reduce from reduce-scatter and all-gather
def all_reduce_in_two(mine):
    """The sum of all ranks' `mine`, on every rank, in its dtype. `mine` may be overwritten."""
    ### BEGIN SOLUTION
    shard = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    full = torch.empty_like(mine)
    dist.all_gather_single(full, shard)
    return full
    ### END SOLUTION


# %% tags=["nbval-check-output"]
lab.check_all_reduce(all_reduce_in_two)

# %%
lab.two_steps(all_reduce_in_two, ranks=RANKS)

# %% [markdown]
# **Notice:** between the two calls each rank holds one piece of the sum.
#
# The workbook builds on this identity: **all-reduce = reduce-scatter + all-gather**. DDP calls both at
# once, as one all-reduce. ZeRO updates its shard of the parameters between the two. Both send the same
# bytes, but ZeRO needs less memory.

# %% [markdown]
# ## Ring all-reduce
#
# In 16 bits the gradients of a 7B model are 14 GB. A rank that sent them to 7 other ranks would send
# 98 GB in each step. In a **ring** each rank sends to the next rank only, and the tensor is split into N
# pieces. In each step a rank sends *one piece*. In the first N−1 steps the receiver *adds* it; in the
# last N−1 steps the receiver *copies* it. You write the second half.

# %%
def ring_reduce_scatter(mine):
    """The first half of a ring all-reduce, in `mine` itself."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = mine.chunk(ranks)  # views: what is written into a piece is written into `mine`
    received = torch.empty_like(pieces[0])
    for step in range(ranks - 1):
        sent = pieces[(rank - step) % ranks]
        target = pieces[(rank - step - 1) % ranks]
        lab.send_recv(sent, received)  # sends to the next rank, receives from the previous one
        target += received
    return mine


lab.ring_steps(ring_reduce_scatter, ranks=4)  # then move the slider: mouse or arrow keys

# %% [markdown]
# **Notice:** a dark frame marks the piece that was just received. There is one per rank in each step,
# so every link of the ring is always busy.
#
# After step 3 each rank holds one complete sum. This is a reduce-scatter, shifted by one: rank 0 holds
# the sum of piece 1, and rank 3 that of piece 0.

# %% [markdown]
# ### Exercise 0.3 · The second half of a ring all-reduce
#
# *Difficulty 3 of 5 · 10 minutes · target: all sums on 2, 3 and 4 ranks, N−1 sends of one piece per rank*
#
# When your function starts, rank r holds the sum of piece r + 1. In each step a rank sends the piece
# that became complete last, and copies what it receives into its place. Which piece does the previous
# rank send to you?

# %%
# Exercise 0.3: the all-gather half of a ring
def ring_all_gather(mine):
    """Completes all pieces of `mine`, in place; piece (rank + 1) % ranks is complete already."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = mine.chunk(ranks)
    received = torch.empty_like(pieces[0])
    ### BEGIN SOLUTION
    complete = (rank + 1) % ranks
    for _ in range(ranks - 1):
        lab.send_recv(pieces[complete], received)
        complete = (complete - 1) % ranks
        pieces[complete].copy_(received)
    ### END SOLUTION
    return mine

# %% [markdown]
# ## Bytes of a ring all-reduce
#
# Now guess: four ranks all-reduce a tensor of 12 MB by both halves. How many MB does *each* rank send?

# %%
# A guess, for exercise 0.3: the MB that each rank sends
### BEGIN SOLUTION
my_guess = 24
### END SOLUTION

labs.guess("0.3", "MB sent by each of 4 ranks", my_guess)

# %% [markdown]
# ### Exercise 0.3, second half · Bytes of a ring all-reduce
#
# *Difficulty 2 of 5 · 5 minutes · target: the bytes that rings of 2, 3 and 4 ranks send*
#
# Write the formula for any size and any number of ranks. How many steps are there, and how many bytes
# does a rank send in each? The check has no formula of its own: it runs your ring on 2, 3 and 4 ranks,
# and counts the bytes that are sent.

# %%
# Exercise 0.3, second half: the bytes of a ring
def ring_bytes(size, ranks):
    """Bytes that each rank sends while a ring of `ranks` all-reduces `size` bytes."""
    ### BEGIN SOLUTION
    steps = 2 * (ranks - 1)
    return steps * size / ranks
    ### END SOLUTION


# %% tags=["nbval-check-output"]
lab.check_ring(ring_all_gather, ring_bytes)

# %% [markdown]
# <details><summary>Hint for the ring</summary>
#
# Idea: the previous rank holds the sum of the piece one before yours. So what arrives in the first step
# is piece r, and it is complete.
#
# Outline: keep the number of the piece that became complete last. In each of N−1 steps, send this
# piece; then go to the piece before it (the piece before piece 0 is piece N−1), copy `received` into
# it, and continue with this one. `copy_` writes into a view; `=` would only give a name to another
# tensor.
#
# </details>

# %%
def ring_all_reduce(mine):
    return ring_all_gather(ring_reduce_scatter(mine))


lab.ring_steps(ring_all_reduce, ranks=4)  # then move the slider to the last step

# %% [markdown]
# **Notice:** from step 4 on, each framed piece is a complete sum. After step 6 every rank holds all four.

# %%
lab.ring_traffic(ring_all_gather, ring_bytes)

# %% [markdown]
# **Notice:** the bars grow with the number of ranks, but stay below the dashed line, which is twice the
# size of the tensor.
#
# No algorithm made of sends and receives sends fewer bytes
# (*[Patarasuk and Yuan, 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)*).
#
# On CPU ranks the bytes and calls are the same as on GPUs, but the seconds are not. Therefore this
# notebook measures no time.

# %% [markdown]
# ## Exceptions on a rank
#
# During Llama 3's pre-training, *[419 unexpected interruptions](https://arxiv.org/abs/2407.21783)*
# happened in 54 days, one every three hours. When one rank raises an exception, the others do not know
# it: they wait in their next collective. `launch` stops all ranks and shows the root cause first, with
# its cell and line. `lab.diagnose` draws what `launch` would raise.

# %%
def share_the_work():
    if dist.get_rank() == 0:
        time.sleep(1)  # as if it read a file: the others reach their collective first
    batches = 12 // dist.get_rank()
    total = torch.tensor(batches, device=labs.device())
    dist.all_reduce(total)
    return total.item()


lab.diagnose(share_the_work, ranks=RANKS)

# %% [markdown]
# **Notice:** rank 0 caused the failure: 12 // 0. The other ranks only wait.
#
# In an error message of `launch`, read the first line first, and look for a line of your own code in it.

# %% [markdown]
# ## Deadlock with uneven batches
#
# A deadlock raises no exception. On the CPU torch waits for 30 minutes before it gives up, and its error
# does not name the missing rank.
#
# Below, rank r has r + 2 batches, as happens when data does not divide evenly. The ranks average their
# loss after every batch. One rank finishes first, and the others wait for it. Which rank will be missing?

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
# **Notice:** read the picture from left to right. A ✓ marks an all-reduce that all ranks completed.
# The dashed boxes name the call in which ranks wait, and the line beside them is yours.
#
# <details><summary>What happened</summary>
#
# All ranks completed all-reduce #1 and #2. Then rank 0 had no batch left and returned. The other ranks
# wait in all-reduce #3.
#
# </details>
#
# So in every deadlock ask: *which rank is missing, and where is it?* `launch` found this deadlock within
# seconds.

# %% [markdown]
# ### Exercise 0.4 · Uneven batches
#
# *Difficulty 2 of 5 · 10 minutes · target: as many means as the shortest rank has losses, and the batches
# that are dropped*
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `dist.all_reduce(x, op=dist.ReduceOp.MIN)` | None; `x` is now the minimum over all ranks | yes |
# | `mean_losses(losses)` | a list: each step's mean over ranks | yes |

# %% [markdown]
# Let all ranks stop after the same step: after as many steps as the rank with the *fewest* batches has.
# No rank knows that number by itself. Also count the batches that all ranks together have not trained
# on, and return this number on every rank. Do not change `mean_losses`.

# %%
def smallest_rank():
    x = torch.tensor(dist.get_rank() + 5, device=labs.device())
    dist.all_reduce(x, op=dist.ReduceOp.MIN)
    return x.item()


launch(smallest_rank, ranks=RANKS)

# %%
# Exercise 0.4: stop together
def mean_losses_together(losses):
    """(means, dropped): the mean over ranks of each step's loss, for as many steps as every rank
    can take, and the number of batches of all ranks that are left."""
    ### BEGIN SOLUTION
    steps = torch.tensor(len(losses), device=labs.device())
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    means = mean_losses(losses[: steps.item()])
    dropped = len(losses) - steps
    dist.all_reduce(dropped)
    return means, dropped.item()
    ### END SOLUTION


# %% tags=["nbval-check-output"]
lab.check_mean_losses(mean_losses_together)

# %% [markdown]
# Ranks with 2, 3, 4 and 5 batches take 2 steps together and drop 6 of 14 batches. So a training script
# gives every rank equally many: PyTorch's `DistributedSampler` does this in notebook 02.
#
# A trainer that does not know the number of batches in advance asks before each step: every rank
# all-reduces a flag that says "I have data", and all ranks stop as soon as one has none. The check accepts
# that, too.

# %% [markdown]
# ## Deadlock with mismatched collectives
#
# In both deadlocks so far, one rank left out a call. Ranks deadlock as well when all of them make a
# call, but not the same one. Here rank 1 broadcasts while the others all-reduce. `launch` compares the
# calls of all ranks before they communicate, and reports the mismatch at once.

# %%
def different_places():
    total = torch.ones(1, device=labs.device())
    if dist.get_rank() == 1:
        dist.broadcast(total, src=1)
    else:
        dist.all_reduce(total)


lab.diagnose(different_places, ranks=RANKS)

# %% [markdown]
# ## Optional: `mp.spawn` and `init_process_group`
#
# Without this workbook, your own script starts its ranks. `mp.spawn` starts new Python processes, and
# each of them imports your script again. Therefore `work` must be in a file, not in a cell. Without the
# line with `__name__`, each rank would start ranks, too.
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
hello_script = HEAD + """
def work(rank, word):
    print(word, "from rank", rank, "of", N)

if __name__ == "__main__":
    mp.spawn(work, args=("hello",), nprocs=N)
"""
lab.run_script(hello_script, ranks=2)

# %% [markdown]
# These processes are not connected yet. They need a *rendezvous*, an address that all of them know: a
# free port, or a file that does not exist yet. A new folder for each run holds no such file, and is
# removed at its end.
#
# | call | returns | blocks? |
# |:--|:--|:--|
# | `tempfile.TemporaryDirectory()` | for `with ... as folder:` the path of a new folder, removed at the end | no |
# | `dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=r, world_size=N)` | None | until N ranks have called it |
# | `dist.destroy_process_group()` | None; ends the group | no |

# %% [markdown]
# ### Exercise 0.5 · A script with `mp.spawn`
#
# *Difficulty 3 of 5 · 20 minutes · target: the right sum, the right exit code, no process left*
#
# Rank r seeds torch with r and calls `torch.rand(1)`. Rank 0 prints the sum over ranks, on a line of its
# own. Two runs may overlap in time. If a rank raises, the exit code is not 0. The check runs the script
# on 2, 3 and 2 ranks, which takes a while.

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
# Idea: start from `hello_script`, and give `work` the address of the rendezvous in place of the word.
#
# Outline: the script begins with `HEAD`, as `hello_script` does. Below the line with `__name__`, make a
# temporary folder, and start the ranks while it exists. In `work`: initialise the process group, seed,
# make the random number, sum, print on one rank only, destroy the group. Do not catch exceptions:
# `mp.spawn` ends the other ranks and raises, and Python then exits with code 1.
#
# </details>

# %% [markdown]
# `launch` does the same for each cell. It also sends functions of a cell to the ranks, starts ranks
# without importing torch again, and diagnoses deadlocks. `torchrun` is what a job on a node uses: it
# passes rank, world size and the address of the rendezvous to each process in environment variables.

# %% [markdown]
# ## I can …
#
# - run a function on N ranks, and say what memory they share (none)
# - draw what each rank holds before and after five collectives
# - build all-reduce from reduce-scatter and all-gather
# - compute how many bytes each of N ranks sends in a ring all-reduce of S bytes
# - read a diagnosis: which rank waits, in which call, for which rank

# %% [markdown]
# ## How it usually goes wrong
#
# - **`if rank == 0:` around a collective**, to log a loss: rank 0 waits alone. Call it on all ranks, and
#   print on one.
# - **Uneven batches**: one rank finishes first; the others wait.
# - **`all_reduce` overwrites its argument**: clone it first if you still need it.
# - **A sum in place of a mean**: training runs, with gradients N times too large.
# - **`isend`, then `irecv`**: works with gloo, can hang with NCCL. Issue both together with
#   `dist.batch_isend_irecv`.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [Bandwidth optimal all-reduce](https://doi.org/10.1016/j.jpdc.2008.09.002) | P. Patarasuk, X. Yuan, JPDC 2009 | Why can no rank send fewer bytes? |
# | [NCCL tests, performance](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md) | NVIDIA | Why is "algbw" multiplied by 2(N−1)/N? What becomes comparable? |
# | [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html) | PyTorch | Which collectives of this notebook have an `async_op`, and what may you not use until `wait` returns? |

# %% [markdown]
# ## What comes next
#
# Notebook 01, Memory math: why one GPU is not enough, and which tensors the bytes of training belong to.
# Notebook 02, Manual DDP: your `mean_over_ranks` becomes data-parallel training that is about as fast as
# PyTorch's own.
