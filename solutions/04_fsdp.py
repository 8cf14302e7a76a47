# %% [markdown]
# # 04 · FSDP
#
# | | |
# |:--|:--|
# | **Time** | 210 minutes in two sittings, the second from "Mixed precision"; 60 for the optional exercise |
# | **Needs** | 2 cores. On GPUs all is measured on them; one shows memory, speed needs several |
#
# Fully sharded data parallelism (FSDP) is ZeRO-3 as torch ships it. You apply `fully_shard`, check
# it, and choose its units. Then you train a model that does not fit into memory with DDP.

# %% [markdown]
# *On one GPU* several ranks share it, with gloo: what each holds and sends is a node's. Seconds are
# not. Of the billion-parameter lab, one rank of eight runs there: its memory shows, speed does not.

# %% [markdown]
# ## You will be able to
#
# - shard a transformer with `fully_shard`, and say what it holds and sends;
# - choose units by what they cost and by what they wait for;
# - predict the largest model that fits, and find it;
# - trade memory for arithmetic, and say what it cost;
# - find what is wrong with a training loop by measuring it.

# %% [markdown]
# ## What is trained here
#
# A GPT-2, on as many ranks as suit this machine: the next cell prints its sizes, and any of them can
# be changed. The checks train a smaller one, so that they take seconds. The first launch waits until
# torch is imported.

# %%
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

import labs
import labs.fsdp as lab

labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
PRESET

# %% [markdown]
# ## From ZeRO-3 to `fully_shard`
#
# In fp32 with AdamW a model of 7 billion parameters takes 112 GB on every rank of DDP, more than an
# H100 has. A shard for one of 8 ranks takes 14 GB.

# %% [markdown]
# `fully_shard(module)` makes a module a **unit**: its parameters become shards (`DTensor`). They
# are gathered just before the unit's forward and backward, and freed after; its gradients are
# reduce-scattered. A parameter stays with the first unit that took it, so shard the inner modules
# first, and the **root**, the model itself, last.

# %% [markdown]
# | call | returns | waits for other ranks? |
# |:--|:--|:--|
# | `fully_shard(module, mesh=...)` | the same module, with *new* parameters | no |
# | `lab.mesh()` | the ranks that share a module: here all of them | on its first call |
# | `lab.blocks(model)` | the list of the transformer's blocks | no |

# %%
def one_unit():
    linear = fully_shard(torch.nn.Linear(6, 4), mesh=lab.mesh())
    return f"whole: {tuple(linear.weight.shape)}, here: {tuple(linear.weight.to_local().shape)}"


labs.launch(one_unit, ranks=2)

# %% [markdown]
# A guess before you build it: DDP holds 16Ψ bytes and its buckets. How many MB will one of the
# ranks hold after backward if everything is sharded? The next cell prints the Ψ of the preset's
# GPT-2; its number of ranks stands below the first cell.

# %%
PSI = lab.parameters_of(PRESET)
f"Ψ = {PSI / 1e6:.1f} million"

# %%
# A guess, for exercise 4.1
### BEGIN SOLUTION
my_guess = round(10 * PSI / 1e6)
### END SOLUTION
labs.guess("4.1", "MB per rank after backward, fully_shard", my_guess)

# %% [markdown]
# ### Exercise 4.1 · Each block is a unit
#
# *Difficulty 2 of 5 · 10 minutes · target: every block is gathered twice a step, in a collective
# of its own, and freed in between*
#
# What is in no block belongs to the root.

# %%
# Exercise 4.1: each block is a unit, what is left belongs to the root
def shard(model, optimizer_class, **settings):
    """A strategy, as in notebook 03: returns (module, optimizer)."""
    ### BEGIN SOLUTION
    for block in lab.blocks(model):
        fully_shard(block, mesh=lab.mesh())
    fully_shard(model, mesh=lab.mesh())
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer
    ### END SOLUTION


# %%
lab.check_shard(shard)

# %% [markdown]
# The check trains a GPT-2 of width 33 on 2 and 4 ranks, neither of which divides 33, and compares
# it with a reference that one process trains on the whole batch. Then it counts bytes by category
# and collectives by kind, and looks at what is still gathered after forward.

# %% [markdown]
# Compare it with the ZeRO-3 that you built. The next cell takes your `zero3` from notebook 03's file
# and checks it; if it does not pass, the cell takes the worked solution's.

# %%
zero3 = lab.your_zero3()
zero3

# %%
lab.compare_with_zero3(zero3, shard, PRESET)

# %% [markdown]
# **Notice:** the black ticks are ZeRO's formulas for stages 0 and 3: 16Ψ and 16Ψ/N bytes, 2Ψ and 3Ψ
# elements. `fully_shard` *is* your ZeRO-3, with one call less, because it keeps the root gathered
# from forward to backward. With the root freed in between it sends the same bytes in as many calls.
# DDP's buffers are its buckets, a second copy of the gradients.

# %% [markdown]
# ## Which units?
#
# One unit for the whole model means two collectives, and everything gathered at once: for 7 billion
# parameters in fp32 that is 28 GB. One unit for each linear layer means little gathered, and many
# collectives.

# %% [markdown]
# A step gathers the root once, because it stays until backward has ended, and every other unit
# twice. Each is reduce-scattered once. The chart above shows one unit per block. How many
# collectives will a step have with one unit for each of a block's four linear layers? The number of
# blocks stands in the preset.

# %%
# A guess, for exercise 4.2
### BEGIN SOLUTION
my_guess = 10 * PRESET.layers
### END SOLUTION
labs.guess("4.2", "collectives per step, each linear", my_guess)

# %% [markdown]
# Each unit arrives in one flat buffer, and its parameters are *copied out* of it. In forward the
# buffer is freed only when the next unit's parameters have been copied out as well, so that copy and
# next all-gather can overlap. The root's parameters stay until backward.
#
# So at the moment at which a unit has been copied out, four things are there: the root's parameters,
# the buffer of the unit before, this unit's buffer, and this unit's parameters.

# %% [markdown]
# ### Exercise 4.2 · What a wrapping costs
#
# *Difficulty 2 of 5 · 10 minutes · target: collectives and bytes of eight lists of units; then the bytes
# of three real wrappings*
#
# Go through the units in the order of forward. The root arrives first, so for the first unit besides it
# the root *is* the unit before. The root may also be the only unit. Backward never holds more of them.

# %%
# Exercise 4.2: what a wrapping costs
def cost(units):
    """units: parameters of each unit, the root's first, then in the order of forward.
    Returns (collectives of a step, bytes gathered at once), in fp32."""
    ### BEGIN SOLUTION
    root, *others = units
    collectives = 1 + 2 * len(others) + len(units)
    arrivals = [before + 2 * unit for before, unit in zip(units, others)]
    return collectives, 4 * (root + max(arrivals, default=root))
    ### END SOLUTION


# %%
lab.check_cost(cost)

# %%
wrappings = {"whole model": lambda model: [], "each block": lab.blocks, "each linear": lab.linears}
compared = lab.compare_wrappings(wrappings, PRESET)
lab.show_wrappings(compared, wrappings, cost)

# %% [markdown]
# **Notice:** from the whole model to blocks, the gathered bytes shrink most; from blocks to linear
# layers the collectives multiply. On a CPU the measured bytes are your `cost`, to the byte. One unit
# for the whole model is there twice: sharding without units needs *more* memory at that moment than
# plain parameters. The chart trains 2 sequences on each rank, fewer than the preset, so that
# activations do not hide the buffers.

# %% [markdown]
# ## The rule
#
# The fewest collectives are *not* the fastest. Nothing computes until the root and the first unit
# have arrived, so one unit for the whole model waits for all its bytes. On a GPU each further
# all-gather is in flight while the unit before it computes: the step waits only for what takes longer
# than that unit's forward.
#
# Units that are too small lose time as well: each collective costs a fixed price, for its launch and
# its copies.

# %% [markdown]
# | argument | is |
# |:--|:--|
# | `gather(n)` | seconds that an all-gather of n parameters is in flight |
# | `compute(n)` | seconds of forward of a unit with n parameters |
# | `price` | seconds that each all-gather costs in addition, whatever else happens |
#
# For a unit of 100 million parameters, on a link of 16 GB/s:

# %%
def gather_on_pcie(parameters):
    return 20e-6 + 4 * parameters / 16e9


gather_on_pcie(100e6)

# %% [markdown]
# ### Exercise 4.3 · Choose a wrapping
#
# *Difficulty 3 of 5 · 20 minutes · target: the least time lost in forward, on seven machines*
#
# Time lost is what forward waits for parameters, and the price of one all-gather for each unit, the
# root's included. The root hides nothing: its layers compute at the very beginning and end.

# %%
# Exercise 4.3: choose a wrapping
def choose(wrappings, free, gather, compute, price):
    """wrappings: name -> units, as in `cost`. free: bytes for gathered parameters.
    Returns the name that fits and loses least time in forward, or None if none fits."""
    ### BEGIN SOLUTION
    def lost(units):
        root, *others = units
        seconds = gather(root) + sum(gather(first) for first in others[:1])
        for unit, following in zip(others, others[1:]):
            seconds += max(0, gather(following) - compute(unit))
        return seconds + price * len(units)

    fits = [name for name, units in wrappings.items() if cost(units)[1] <= free]
    return min(fits, key=lambda name: lost(wrappings[name]), default=None)
    ### END SOLUTION


# %%
lab.check_choose(choose)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write a function that returns the seconds lost by one list of units. The root's gather and the
# first unit's are waited for in full. Then go through pairs of neighbours: the second unit's gather
# runs while the first unit computes, so only the difference is waited for, and never less than
# zero. Last, keep the wrappings whose gathered bytes fit, and take the one that loses least.
#
# </details>

# %%
lab.show_lost(choose)

# %% [markdown]
# **Notice:** one unit for all loses most on every link, although it takes the fewest collectives.
# One unit for each block is the usual choice: on NVLink it saves 91 % of that loss, each linear layer
# 82 %. On 100 GbE every wrapping waits for the link: with each of the last three a forward loses
# 1.48 to 1.49 s, which is no difference that matters.
# Notebook 05 finds both mistakes, one huge unit and tiny units, in traces.

# %% [markdown]
# ## Gradients of several micro-batches
#
# A batch that does not fit is trained in micro-batches: their gradients add up before one optimizer
# step. By default FSDP reduces after each of them. DDP's `no_sync` has a counterpart:
# `module.set_requires_gradient_sync(False)` keeps the *whole* gradients on each rank until the last
# micro-batch. `set_reshard_after_backward(False)` and `set_reshard_after_forward(False)` keep the
# whole parameters too. In the table's first two rows they are `True` for all units, also for
# the root. The cell takes up to a minute.

# %%
lab.compare_accumulation(shard, PRESET)

# %% [markdown]
# **Notice:** reducing once sends fewer bytes, and holds the gradients whole: 4Ψ bytes instead of
# 4Ψ/N. Where the parameters are never freed either, it sends what DDP sends, and saves memory only
# on the optimizer state, as ZeRO-1 does. The price of less communication is memory, so under a
# tight limit reduce after each part.

# %% [markdown]
# ## Out of memory, for real
#
# From here on a rank has a **limit**: `launch(..., memory_limit=bytes)` lets it take no more than
# that beyond what it starts with, and the allocation that would exceed it fails. On a CPU all
# writable memory counts, so Python's objects and thread stacks too. On a GPU it is what torch's
# allocator takes from the card.
#
# The ranks train a GPT-2 of this size, first with DDP, then with your `shard`:

# %%
LIMIT = lab.memory_limit()  # bytes for each rank: by formula enough for FSDP, and not for DDP
lab.preset(lab="limit")

# %%
lab.train_under_limit({"DDP": lab.ddp, "FSDP": shard}, LIMIT)

# %% [markdown]
# **Notice:** the hatched bar is what DDP would have needed, by formula. The red line is the limit at
# which DDP's allocation was refused, on a CPU by the operating system. FSDP trains the same model on the same data
# under the same limit, and its measured bar ends at the formula's tick.

# %% [markdown]
# ## Compute instead of remember
#
# In the last picture activations are the largest part of FSDP's bar. **Activation checkpointing**
# keeps only a block's input, and runs the block again when backward reaches it. Each block gets a
# checkpoint of its own, because a single one around the model would bring all activations back at
# once.

# %% [markdown]
# | call | returns |
# |:--|:--|
# | `checkpoint_wrapper(block)` | a *new* module around the block; the block itself is unchanged |
# | `lab.blocks(model)` | the model's own list: the model runs what you put into it |

# %%
layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
layers[0] = checkpoint_wrapper(layers[0])
layers

# %% [markdown]
# ### Exercise 4.4 · Every block is computed again in backward
#
# *Difficulty 2 of 5 · 10 minutes · target: after forward, a block keeps its input and nothing else*

# %%
# Exercise 4.4: every block is computed again in backward
def checkpointed(model, optimizer_class, **settings):
    """A strategy: as `shard`, with activation checkpointing."""
    ### BEGIN SOLUTION
    blocks = lab.blocks(model)
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block)
    return shard(model, optimizer_class, **settings)
    ### END SOLUTION


# %%
lab.check_checkpointed(checkpointed)

# %% [markdown]
# What does it save, and what does it cost? The next cell trains the model of the last picture, now
# without a limit, under each of three strategies: for memory, for arithmetic, and five times for
# speed. It takes up to a minute.

# %%
compared = lab.compare_strategies(
    {"DDP": lab.ddp, "FSDP": shard, "FSDP + checkpointing": checkpointed})
lab.show_memory_and_arithmetic(compared)

# %% [markdown]
# **Notice:** does checkpointing take three times less memory for a third more time? The lines below
# the chart say what it is here. Three counts activations alone, and grows
# with the layers, because only one block has all of its activations at a time. The third counts a
# whole second forward: 4 instead of 3, since backward costs two. In torch it is less, because a
# block's last matrix product and the head are not computed again.

# %% [markdown]
# ## Parameters in the host's memory
#
# With **CPU offload** shards, gradients and optimizer state live in the host's memory. A rank's
# shard of a unit is copied to the GPU when the unit is gathered, and the shard of its gradient is
# copied back. **Pinned memory**, which the operating system leaves where it is, makes these copies
# faster, but there is none without a GPU.

# %%
def offloaded(model, optimizer_class, **settings):
    policy = CPUOffloadPolicy(pin_memory=lab.device().type == "cuda")
    for block in lab.blocks(model):
        fully_shard(block, mesh=lab.mesh(), offload_policy=policy)
    fully_shard(model, mesh=lab.mesh(), offload_policy=policy)
    return model, optimizer_class(model.parameters(), **settings)


lab.show_offload(shard, offloaded)

# %% [markdown]
# Over a GPU's PCIe link the bytes of a step take time. How much, compared with what the GPU computes
# meanwhile? Here for 7 billion parameters, computed:

# %%
lab.offload_on_gpus()

# %% [markdown]
# **Notice:** from the T4 to the B200 computing became 35 times faster and PCIe 4 times. So the
# copies take 10 % of the computing time on the one, and 86 % on the other. More tokens in a step
# make the share smaller, because the bytes stay the same. Copies can be hidden by computing, but
# AdamW on the host cannot: for eight A100s it takes 1.5 s, longer than their 1.33 s of computing.

# %% [markdown]
# ## The largest model that fits
#
# How many times more parameters than with DDP can be trained with FSDP and checkpointing, on as many
# ranks, under the same limit?

# %%
# A guess, for exercise 4.4
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("4.4", "times larger than with DDP, FSDP + checkpointing", my_guess)

# %% [markdown]
# `lab.largest_model` first *predicts* the number of layers that fit: the bytes of tensors, by the
# formulas of notebook 01's explorer, plus what a rank takes besides tensors, measured in two runs
# without a limit. Then it trains real models under the limit, until one fits and the model with one
# more layer runs out of memory. Each of the next three cells takes 5 to 30 seconds, on 8 GPUs up to
# two minutes.

# %%
largest_ddp = lab.largest_model("DDP", lab.ddp, LIMIT)
largest_ddp

# %%
largest_fsdp = lab.largest_model("FSDP", shard, LIMIT)
largest_fsdp

# %%
largest_checkpointed = lab.largest_model("FSDP + checkpointing", checkpointed, LIMIT)
largest_checkpointed

# %%
lab.show_largest_models(compared, largest_ddp, largest_fsdp, largest_checkpointed)

# %%
lab.summary_table(compared, largest_ddp, largest_fsdp, largest_checkpointed)

# %% [markdown]
# **Notice:** the last column says how far prediction and trial are apart; a formula is cheaper than a
# job that runs out of memory. FSDP's gain grows with the ranks, because states shrink as 1/N.
# Activations do not, so checkpointing has to shrink them. With many ranks the whole model, which
# each builds before it is sharded, becomes the limit. Tokens per second are this machine's: on a CPU
# they say little about a GPU's.

# %% [markdown]
# ## Mixed precision
#
# Activations and gathered parameters are the rest of the bar. In 16 bits they take half.
#
# A `MixedPrecisionPolicy` has two types. `param_dtype`: what is gathered and computed with.
# `reduce_dtype`: what gradients travel and are summed in. The shards that the optimizer updates stay
# as the model was built, in fp32.
#
# bf16 has fp32's range with fewer digits: 8 bits, so 256 + 1 is 256. A sum over many ranks loses
# what is small.

# %%
MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # reduce_dtype=None: the same type

# %% [markdown]
# Before you choose: an all-reduce of Ψ gradients in fp32 moves 4 + 4 bytes for each parameter, in
# two passes. FSDP gathers twice and reduces once. How many bytes does it move for each parameter if
# it computes in bf16 and sums in fp32?

# %%
# A guess, for exercise 4.5
### BEGIN SOLUTION
my_guess = 6
### END SOLUTION
labs.guess("4.5", "bytes moved for each parameter, bf16 and fp32 sums", my_guess)

# %% [markdown]
# ### Exercise 4.5 · Compute in bf16, sum in fp32
#
# *Difficulty 2 of 5 · 10 minutes · target: parameters gathered in bf16, gradients reduced in
# fp32; the units of exercise 4.1*
#
# Compute in bf16, and lose no digits in sums and updates.

# %%
# Exercise 4.5: gather and compute in bf16, reduce in fp32
def mixed(model, optimizer_class, **settings):
    """A strategy: as `shard`, with mp_policy=MixedPrecisionPolicy(...) for every unit."""
    ### BEGIN SOLUTION
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in lab.blocks(model):
        fully_shard(block, mesh=lab.mesh(), mp_policy=policy)
    fully_shard(model, mesh=lab.mesh(), mp_policy=policy)
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer
    ### END SOLUTION


# %%
lab.check_mixed(mixed)

# %%
lab.show_precision(shard, mixed)

# %% [markdown]
# **Notice:** shards and optimizer state stay as they are; activations and gathered bytes halve. Two
# gathers in bf16 and a reduction in fp32 are 2 + 2 + 4 bytes for a parameter, as many as an fp32
# all-reduce; the chart shows slightly less, because the root is gathered once. Reducing in bf16 would
# save a quarter of that, and lose digits.

# %% [markdown]
# fp16 has more digits than bf16 and a small range: its smallest number is 6e-8. A micro-batch of
# 256 tokens in a batch of 262,144 counts 1/1,024 of the loss, so its gradients are small. Which of
# them survive?

# %%
lab.count_underflow()

# %% [markdown]
# **Notice:** fp16 loses gradients to **underflow**: with the loss multiplied by 65,536 they are
# back (gradients must then be divided by it before the optimizer's step). That is **loss scaling**.
# bf16 needs none, because it has fp32's range. Its zeros are as many with the factor as without:
# these are sums that cancel exactly after rounding, so scaling the loss cannot bring them back.

# %% [markdown]
# ## Replicas of shards
#
# Two nodes, 8 A100s each: NVLink inside a node carries 300 GB/s for each GPU, the network between
# them a tenth of that or less. **HSDP** (hybrid sharding) keeps the all-gathers inside: the mesh
# gets two dimensions, `replicate` and `shard`. Ranks of one row share a model; the rows are
# replicas, whose shards of gradients are all-reduced.
#
# `fully_shard` needs nothing but that mesh. Inside the next cell `lab.mesh()` has two dimensions, and
# your `shard` runs unchanged.

# %%
lab.compare_meshes(shard, PRESET)

# %% [markdown]
# **Notice:** with two replicas a rank holds twice as much, and gathers among half as many ranks. Only
# the all-reduce leaves the row, and it carries one shard of the gradients instead of two gathers of
# the whole model.

# %% [markdown]
# ## Never whole
#
# So far every rank built the whole model first: 28 GB for 7 billion parameters in fp32, and 8 times
# that on a node. On the **meta device** a tensor has a shape and no memory. So build there, shard,
# and only then allocate. `to_empty` allocates and writes nothing: what lies in that memory is
# garbage, until somebody draws numbers. On a CPU every rank draws with its own generator, so equal
# seeds give equal shards.

# %% [markdown]
# | call | does |
# |:--|:--|
# | `model.to_empty(device=...)` | allocates this rank's shards on `lab.device()` |
# | `lab.mesh().get_local_rank("shard")` | returns this rank's place among the shards |
# | `model._init_weights(module)` | draws the numbers of one of its modules |
# | `model.apply(function)` | calls `function(module)` for each module, children first |
#
# torch's own layers draw in `reset_parameters()`. Hugging Face's own do not have that: the model
# draws for them. The order matters, because GPT-2's attention and MLP draw their last layer again,
# with a smaller standard deviation.

# %%
with torch.device("meta"):
    shape_only = torch.nn.Linear(4, 4)
shape_only.weight.device, shape_only.to_empty(device="cpu").weight.device

# %% [markdown]
# ### Exercise 4.6 · A model that no rank ever holds
#
# *Difficulty 4 of 5 · 25 minutes · target: no rank holds more than its shards; shards differ, replicas
# are equal, and numbers are drawn as the model draws them*
#
# The check builds GPT-2 and a Qwen2, whose embedding and head share a weight (tied weights), on a
# mesh of 4 shards and on one of 2 × 2. `to_empty` before `shard` would untie them.

# %%
# Exercise 4.6: a model that no rank ever holds
def from_meta(make_model, optimizer_class, **settings):
    """make_model() builds one of Hugging Face's models. Returns (module, optimizer)."""
    ### BEGIN SOLUTION
    with torch.device("meta"):
        model = make_model()
    shard(model, optimizer_class)
    model.to_empty(device=lab.device())
    torch.manual_seed(lab.mesh().get_local_rank("shard"))
    model.apply(model._init_weights)
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer
    ### END SOLUTION


# %%
lab.check_from_meta(from_meta)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Five steps, each of one or two lines: shapes, units, memory, numbers, and an optimizer. Two ranks with the
# same place among the shards hold the same shard, one in each replica: which seed do they need? The
# optimizer comes after the units, because `fully_shard` replaces the parameters; `to_empty` and the
# numbers only fill those.
#
# </details>

# %% [markdown]
# **Notice:** `model.init_weights()` looks like a shorter way. Hugging Face's method skips modules
# without parameters of their own in what it takes for custom code, and `fully_shard` changes the
# model's class. So it leaves out GPT-2's scaling, without a word; the check measures it.

# %% [markdown]
# ## Save shards, load on other ranks
#
# A **full** state dict gathers everything on one rank. A **sharded** one stays in parts, and each
# rank writes its own.
#
# | call | does |
# |:--|:--|
# | `get_state_dict(module, optimizer)` | returns two dictionaries with this rank's shards |
# | `dcp.save(state, checkpoint_id=folder)` | writes them; `dcp.load` *fills* such dictionaries |
# | `set_state_dict(module, optimizer, model_state_dict=..., optim_state_dict=...)` | puts everything in place, also the learning rate |
#
# All ranks call them together.

# %%
def names_of_a_state():
    module = fully_shard(torch.nn.Linear(2, 2), mesh=lab.mesh())
    weights, state = get_state_dict(module, torch.optim.AdamW(module.parameters()))
    return list(weights), list(state)


labs.launch(names_of_a_state, ranks=2)[0]

# %% [markdown]
# ### Exercise 4.7 · Written by 4 ranks, read by 2
#
# *Difficulty 3 of 5 · 15 minutes · target: each rank writes its share, nothing is gathered whole, and
# training goes on as if it had not stopped*

# %%
# Exercise 4.7: written by 4 ranks, read by 2
def save(module, optimizer, folder):
    """Writes parameters and optimizer state of all ranks."""
    ### BEGIN SOLUTION
    parameters, state = get_state_dict(module, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)
    ### END SOLUTION


# %%
# Exercise 4.7, second half
def load(module, optimizer, folder):
    """Reads them into this module and optimizer, on any number of ranks."""
    ### BEGIN SOLUTION
    parameters, moments = get_state_dict(module, optimizer)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    ### END SOLUTION


# %%
lab.check_checkpoint(save, load)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Both sides need the same dictionary: one for the model, one for the optimizer, under two names of
# yours. `dcp.load` fills tensors that are already there, so loading begins with the state of the
# module that is to be filled, and ends by putting it back. A fresh optimizer has no moments yet;
# `get_state_dict` makes room for them.
#
# </details>

# %%
lab.compare_state_dicts(shard)

# %% [markdown]
# **Notice:** the full state dict is on rank 0 alone, and must fit there; other programs can read
# it. It has the tied weight twice, once under each name, so it is larger than all shards together.
# To go on training, on any number of ranks, the sharded one is enough.

# %% [markdown]
# ## FSDP1, for reading older code
#
# `fully_shard` replaces `FullyShardedDataParallel`, which wraps the module instead of changing it, and
# puts each unit's parameters into one flat parameter. FSDP1 is *deprecated*: PyTorch's
# *[tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP1_tutorial.html)* says so. Older code
# still uses it. Here are its names, what each became, and what one step with each sent, in which order.

# %%
lab.fsdp1_names()

# %% [markdown]
# **Notice:** `SHARD_GRAD_OP` gathers once instead of twice; `NO_SHARD` gathers nothing, and reduces
# whole gradients: DDP. In bf16 half the bytes are gathered. `BACKWARD_PRE` and `BACKWARD_POST` send
# the same, in another order: only the first one calls the next block's all-gather *before* this
# block's gradients are computed, so that they can hide it.
#
# Units were chosen by a policy: every module of a class, or every module from a size on.

# %%
lab.fsdp1_wrap_policies(PRESET)

# %% [markdown]
# **Notice:** by size, the units follow a number and not the structure of the model. The size at which
# blocks become units gives what the other policy gives, call for call; a smaller one splits them.

# %% [markdown]
# ## Debug the internet
#
# Three pieces that you can find in tutorials and answers, each of which runs without an error. Measure
# first, then repair.
#
# The first is "a complete FSDP training loop, with gradients clipped to a norm of 0.5". The table
# shows what the optimizer really used.

# %%
def found_loop(module, optimizer, batches):
    for batch in batches:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(list(module.parameters()), max_norm=0.5)


lab.try_loop(found_loop)

# %% [markdown]
# ### Exercise 4.8 · A loop that trains something else
#
# *Difficulty 2 of 5 · 10 minutes · target: the parameters of one process after 4 clipped steps*
#
# There are two mistakes.

# %%
# Exercise 4.8: the same loop, repaired
def loop(module, optimizer, batches):
    """One step on each batch, with the gradient clipped to a global norm of 0.5."""
    ### BEGIN SOLUTION
    for batch in batches:
        optimizer.zero_grad()
        module(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    ### END SOLUTION


# %%
lab.check_loop(loop)

# %% [markdown]
# The second: "for older GPUs use fp16 instead of bf16, the rest stays the same". A module under
# FSDP computes in fp16. Each batch is one micro-batch of many, so its loss counts only a `share` of
# the whole batch's. For the table's last row, one gradient of one rank is made infinite.

# %%
def found_step(module, optimizer, batch, share):
    (module(**batch).loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()


lab.try_step(found_step)

# %% [markdown]
# ### Exercise 4.9 · fp16 without losses
#
# *Difficulty 4 of 5 · 20 minutes · target: fewer than 1 % of the gradients lost, and no step with an
# infinite one*
#
# A scale that brings small gradients back can make large ones infinite. Such a step is skipped, on
# *all* ranks: each sees only its own shards, `p.grad.to_local()`.

# %%
# Exercise 4.9: a step in fp16
def scaled_step(module, optimizer, batch, share):
    """Forward, backward, step and zero_grad; the loss counts `share` of the whole batch's."""
    ### BEGIN SOLUTION
    scale = 2.0**16
    (module(**batch).loss * share * scale).backward()
    finite = torch.ones((), device=lab.device())
    for parameter in module.parameters():
        parameter.grad.div_(scale)
        finite *= parameter.grad.to_local().isfinite().all()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    ### END SOLUTION


# %%
lab.check_scaled_step(scaled_step)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Multiply the loss before backward, divide every gradient after it. The optimizer must see numbers as
# if nothing had been scaled. Then ask: is everything finite here? The answer of one rank is not
# enough, and all ranks must decide alike, or their shards come from different steps. A collective
# that takes a minimum turns the answers into one. Whether the step is made or not, the gradients are
# cleared.
#
# </details>

# %% [markdown]
# In practice `torch.amp.GradScaler` does this, for FSDP2's shards too, and adapts the scale.
#
# The third: "under FSDP the all-reduce of gradients takes 30 % of the step, so tune that", with a
# function that measures it. Each of its `calls` is one collective, and has `kind`, `elements` and
# `bytes`.

# %%
def found_meter(calls):
    return sum(call.bytes for call in calls if call.kind == "all_reduce")


lab.try_meter(found_meter)

# %% [markdown]
# ### Exercise 4.10 · In which collectives do gradients travel?
#
# *Difficulty 2 of 5 · 5 minutes · target: the right bytes under FSDP, DDP, bf16 and HSDP*

# %%
# Exercise 4.10: bytes in which gradients travel
def gradient_bytes(calls):
    """calls: the collectives of one step, under any strategy."""
    ### BEGIN SOLUTION
    return sum(call.bytes for call in calls if call.kind in ("all_reduce", "reduce_scatter"))
    ### END SOLUTION


# %%
lab.check_gradient_bytes(gradient_bytes)

# %% [markdown]
# **Notice:** whoever searches an FSDP trace for an all-reduce of gradients finds none. In fp32,
# gathered parameters are about two thirds of FSDP's bytes: time that is blamed on gradients may be
# theirs. HSDP does all-reduce gradients, but only their shards.

# %% [markdown]
# ## A billion parameters
#
# All of it together, at a real size: a GPT-2 with 20 layers of width 2048 has 1.01 billion
# parameters. In fp32 with AdamW these are 16.2 GB of parameters, gradients and optimizer state on
# every rank of DDP, and 2.0 GB on each of 8 ranks of FSDP. Activations come on top, on every rank.

# %% [markdown]
# The batch is the smallest with which DDP runs out of memory on the card that is found. A second
# model is so large that DDP could not hold its states with any batch. Your strategies train both.
# FSDP1 is compared with them; `lab.block_policy(model)` is its `transformer_auto_wrap_policy` for the
# blocks' class:

# %%
def fsdp1(model, optimizer_class, **settings):
    policy = lab.block_policy(model)
    module = FSDP1(model, auto_wrap_policy=policy, use_orig_params=True, device_id=lab.device())
    return module, optimizer_class(module.parameters(), **settings)


# %% [markdown]
# On several GPUs the next cell trains every row, one after the other, in about 4 minutes on 8 A100s.
# On one GPU it runs one of eight ranks alone: tensors and memory are real, but there is no other
# rank, so no loss and no speed. Without a GPU it predicts, for 8 A100s, a step's milliseconds in four
# parts. **Exposed** communication is what computing does not hide, and by how much it slows computing
# down.

# %%
billion = lab.billion_parameters(shard, mixed, checkpointed, offloaded, fsdp1)
lab.node_table(billion)

# %%
lab.node_steps(billion)

# %%
lab.node_chart(billion)

# %% [markdown]
# **Notice:** on 8 A100s with 80 GB, predicted (on an H200, one rank of 8 held at most 0.9 % more than
# predicted): sharding brings the peak from 87.8 GB to 73.6, and what is left is nearly all activations,
# which FSDP does not shard. bf16 halves them. In the larger model, checkpointing brings 74.3 GB to
# 16.6, where states are the larger part again. CPU offload takes those away. So find out which part is
# large, and then choose.

# %% [markdown]
# None of it is free. FSDP sends 1.5 times DDP's bytes, and 33 ms instead of 21 are exposed; but AdamW
# on an eighth of the parameters saves 14 ms, so over NVLink both take as long. Checkpointing computes
# 24 % more. Offload takes 57 % longer: its copies are hidden, AdamW in the host's memory is not. And 8
# GPUs do the work of 7.6, since one GPU communicates nothing.

# %% [markdown]
# ## The same steps on ranks of a CPU
#
# Two cores cannot compute like A100s, but they can take as long. In the next cells each block
# computes, then its rank sleeps until a *stated time* is over; collectives pass 02's slow link, and
# offload's copies one with PCIe's rate. The rates are an A100 node's, divided by two factors, so that
# collectives take the same share of computing as in the model above.

# %%
pace = lab.slow_down(shard)
lab.show_pace(pace)

# %% [markdown]
# Memory, calls and bytes are real, under the limit of 4.1. The model of step time that predicted the
# A100s gets the slowed node's rates. It takes half a minute; where GPUs have measured all this
# already, the cells show that again.

# %%
laptop = lab.laptop_steps(pace, billion, shard, checkpointed, offloaded)
lab.node_table(laptop)

# %%
lab.node_steps(laptop)

# %%
lab.node_chart(laptop)

# %% [markdown]
# **Notice:** the same lesson, measured. DDP runs out of memory; FSDP trains that model, and one
# whose states DDP could never hold. Checkpointing buys memory with computing, and offload buys more
# with AdamW on the host. More ranks do less each, and *exposed* names what for. The prediction leaves
# out what no GPU has: gloo's own work, and four ranks on two cores.

# %% [markdown]
# ### Exercise 4.11 · What scaling costs
#
# *Difficulty 3 of 5 · 20 minutes · target: three prices of any job, exactly*
#
# - `efficiency(few, many)`: each is (GPUs, tokens of a step on all of them, its seconds). Which share
#   of a GPU's tokens per second is left on many?
# - `communication_ratio`: seconds of FSDP's collectives in fp32, over seconds of computing (6 FLOPs a
#   parameter and token). `tokens` are a rank's; `link` is in bytes/s.

# %% [markdown]
# - `offload`: seconds of a rank's copies over its PCIe, and of AdamW on the host. The shard is copied
#   before each of two gathers, and its gradient back, all in fp32. On a CPU, AdamW is eight
#   operations one after the other, which move 80 bytes for each parameter through the host's memory.
#   All ranks share that memory: `host` bytes/s for all of them together.

# %%
# Exercise 4.11: what scaling costs
def efficiency(few, many):  # each (GPUs, tokens, seconds)
    ### BEGIN SOLUTION
    per_gpu = [tokens / seconds / gpus for gpus, tokens, seconds in (few, many)]
    return per_gpu[1] / per_gpu[0]
    ### END SOLUTION


def communication_ratio(psi, ranks, tokens, flops, link):
    ### BEGIN SOLUTION
    sends = 3 * 4 * psi * (ranks - 1) / ranks
    return (sends / link) / (6 * psi * tokens / flops)
    ### END SOLUTION

# %%
# Exercise 4.11, continued: (seconds of copies, seconds of AdamW)
def offload(psi, ranks, pcie, host):
    ### BEGIN SOLUTION
    return 3 * 4 * psi / ranks / pcie, 80 * psi / host
    ### END SOLUTION


# %%
lab.check_scaling_costs(efficiency, communication_ratio, offload)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write down bytes first, then divide by the rate of what carries them. FSDP has three collectives a
# step, and a rank sends all parts of each but its own. A rank's copies are of its shard, but the host
# updates every rank's.
#
# </details>

# %% [markdown]
# Your formulas on the table's jobs, with the data sheets' rates of an A100, TF32, NVLink, PCIe and two
# EPYC sockets:

# %%
lab.show_scaling_costs(efficiency, communication_ratio, offload)

# %% [markdown]
# **Notice:** the copies are a quarter of AdamW's time. No card reaches its data sheet's rates, so
# the table's milliseconds are longer: its model has the shares that published runs reach.

# %% [markdown]
# ## Optional: `fully_shard` from nothing
#
# Notebook 03 laid a unit's parameters into one flat tensor, so a shard could end inside a row, and
# was nobody's parameter. FSDP2 cuts each parameter by its rows, with k = rows / N, rounded up: rank
# r keeps rows r·k to (r + 1)·k. A shard keeps its name and its type. But a block of GPT-2 has 12
# parameters. Twelve all-gathers would cost the fixed price twelve times, so the rows are *packed*
# into one buffer.

# %% [markdown]
# Rows that are missing on the last ranks are padding. Two ranks pack a weight with 3 rows of 4 and a
# bias with 3 numbers: k is 2, so the buffer of a rank has 2·4 + 2·1 numbers, and rank 1 pads 4 + 1
# of them.

# %%
class Shard(torch.nn.Parameter):
    """This rank's rows of a parameter."""


def places_of(module):
    """parameter -> its places, [(submodule, name), ...]: two, if it is tied. Without shards."""
    found = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not isinstance(parameter, Shard):
                found.setdefault(parameter, []).append((owner, name))
    return found


[places for places in places_of(torch.nn.Linear(4, 3)).values()]

# %% [markdown]
# The unit's whole parameters stay the same objects. What comes and goes is their memory, and their
# place in the module, where the shard stands otherwise. You built that for exercise 3.10, so it is
# given here. Whole parameters are in bf16: 2 bytes for each number.

# %%
def put(unit, parameters):
    for places, parameter in zip(unit.places, parameters):
        for owner, name in places:
            owner._parameters[name] = parameter


def allocate(unit):
    for w in unit.whole:
        w.untyped_storage().resize_(2 * w.numel())
    put(unit, unit.whole)
    return unit.whole

# %%
def free(unit):
    for w in unit.whole:
        w.untyped_storage().resize_(0)
    put(unit, unit.shards)


def is_whole(unit):
    return all(w.untyped_storage().nbytes() for w in unit.whole)


def padded(tensor, length):  # its numbers in one dimension, and zeros up to this length
    return torch.nn.functional.pad(tensor.detach().flatten(), (0, length - tensor.numel()))


padded(torch.ones(1, 4), 8)  # what rank 1 packs of the weight above

# %% [markdown]
# ### Exercise 4.12 · Rows, packing, types and prefetch
#
# *Difficulty 5 of 5 · 60 minutes · target: the collectives of `mixed`, call for call, and its numbers*
#
# | call | does |
# |:--|:--|
# | `lab.all_gather(full, piece, async_op=True)` | returns a handle; after its `.wait()`, the flat `full` has all ranks' pieces |
# | `lab.reduce_scatter(flat).wait()` | returns this rank's piece of the sum |
# | `full.split(lengths, dim=1)` | cuts columns: of a parameter, the rows of all ranks |
#
# `lengths`: of a rank's padded rows. `order`: one list, which all units of a model share.

# %%
# Exercise 4.12: what a rank keeps of a unit
class Unit:
    def __init__(self, module):
        places = places_of(module)
        self.places, self.ready, self.in_flight = list(places.values()), 0, None
        self.shards, self.whole, self.lengths = [], [], []  # one of each for each parameter
        ### BEGIN SOLUTION
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for p in places:
            k = -(-len(p) // ranks)
            self.lengths.append(k * p[0].numel())
            self.shards.append(Shard(p.detach()[rank * k : (rank + 1) * k].clone()))
            self.whole.append(torch.nn.Parameter(p.detach().bfloat16()))
        free(self)
        ### END SOLUTION

# %%
# Exercise 4.12, continued: one all-gather for all of a unit, in bf16
def start(unit):  # calls it, unless the unit is whole or in flight
    ### BEGIN SOLUTION
    if not unit.in_flight and not is_whole(unit):
        mine = torch.cat([padded(s, n) for s, n in zip(unit.shards, unit.lengths)]).bfloat16()
        full = mine.new_empty(dist.get_world_size(), len(mine))
        unit.in_flight = full, lab.all_gather(full.view(-1), mine, async_op=True)
    ### END SOLUTION


def gather(unit):  # waits for it, and unpacks
    start(unit)
    ### BEGIN SOLUTION
    if unit.in_flight:
        (full, handle), unit.in_flight = unit.in_flight, None
        handle.wait()
        for w, columns in zip(allocate(unit), full.split(unit.lengths, dim=1)):
            w.data.copy_(columns.flatten()[: w.numel()].view(w.shape))
    ### END SOLUTION

# %%
# Exercise 4.12, continued: a gradient of a whole parameter is complete
def count(unit):
    unit.ready += 1
    if unit.ready < len(unit.whole):
        return
    unit.ready, ranks = 0, dist.get_world_size()
    ### BEGIN SOLUTION
    gradients = [padded(w.grad.float(), ranks * n) for w, n in zip(unit.whole, unit.lengths)]
    for w in unit.whole:
        w.grad = None
    free(unit)
    flat = torch.cat([g.view(ranks, -1) for g in gradients], dim=1).flatten()
    mean = lab.reduce_scatter(flat).wait() / ranks
    for shard, piece in zip(unit.shards, mean.split(unit.lengths)):
        piece = piece[: shard.numel()].view(shard.shape)
        shard.grad = piece.clone() if shard.grad is None else shard.grad + piece
    ### END SOLUTION

# %%
# Exercise 4.12, continued: the root's forward comes first, and the root stays whole until backward
def before_forward(unit, order):
    if order[:1] == [unit]:  # the root again: another forward begins
        order.clear()
    order.append(unit)
    gather(unit)


def after_forward(unit, order):
    ### BEGIN SOLUTION
    if unit is not order[0]:
        free(unit)
    ### END SOLUTION


def before_backward(unit, order):
    gather(unit)
    ### BEGIN SOLUTION
    start(order[max(order.index(unit) - 1, 0)])
    ### END SOLUTION

# %%
def my_fully_shard(module, order):
    unit = Unit(module)
    module.register_forward_pre_hook(lambda *_: before_forward(unit, order))
    module.register_forward_hook(lambda *_: after_forward(unit, order))
    module.register_full_backward_pre_hook(lambda *_: before_backward(unit, order))
    for w in unit.whole:
        w.register_post_accumulate_grad_hook(lambda _: count(unit))

# %%
def my_fsdp(model, optimizer_class, **settings):
    order = []
    for module in [*lab.blocks(model), model]:
        my_fully_shard(module, order)
    return model, optimizer_class(model.parameters(), **settings)


lab.check_from_scratch(my_fsdp)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Think of the buffer as a table: a row for each rank, and columns for each parameter. A rank fills
# its row; the all-gather gives all rows. A parameter is its columns, read row by row, without the
# padding at the end. Gradients take the way back: padded, cut into rows, side by side, summed.
#
# Write into whole parameters through `.data`, or autograd refuses what it has saved. Cast before
# you add ranks up. A gradient of an earlier micro-batch may be there. And the order: while this unit
# computes its gradients, the one before it in forward should travel.
#
# </details>

# %% [markdown]
# ## A script of your own
#
# What a job on a cluster is: a file, started by `torchrun`, that writes checkpoints. You have all its
# parts; samples, model and loop are those of 02's `ddp.py`, and nothing in it is of this workbook.

# %% [markdown]
# ### Exercise 4.13 · `fsdp.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: updates as one process has them on 2 ranks, and on 3 that go
# on from the checkpoint of 2; bf16 gathered, fp32 reduced; blocks recomputed*
#
# The next cell writes the file. Fill in its three gaps. Without `--bf16` everything is fp32, and
# without `--recompute` nothing is recomputed. A job that goes on begins with the epoch after the last
# one that was saved.

# %%
lab.write_script("fsdp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: exercises 4.1, 4.4 and 4.5 in one. `checkpoint_wrapper` returns a new module, which must
# stand in the model's list and be sharded in the block's place. The root needs the policy, too.
#
# Second and third gap: exercise 4.7, with one more entry for the number of epochs. `dcp.load` fills
# tensors in place, and replaces what is none in the dictionary that it is given.
#
# </details>

# %%
lab.check_fsdp("fsdp.py")

# %%
lab.torchrun("fsdp.py", "--bf16", "--recompute", "--epochs", 1, ranks=2)

# %%
lab.torchrun("fsdp.py", "--resume", "fsdp_checkpoints/epoch_1", "--epochs", 2, ranks=1)

# %% [markdown]
# **Notice:** two ranks have written, and one goes on: the checkpoint knows tensors, not ranks. Nor does
# it know the types that were gathered, since shards are fp32.

# %% [markdown]
# ## I can …
#
# - write a job with `fully_shard`, and resume it
# - say what a unit is, count a wrapping's collectives, and what its forward waits for
# - say why the optimizer comes after the units
# - predict the largest model for some ranks and bytes
# - say what checkpointing costs
# - say which bytes mixed precision halves
# - compute the cost of scaling and offload
# - build a model that no rank ever holds, and load it elsewhere
# - measure whether a training loop does what it says

# %% [markdown]
# ## How it usually goes wrong
#
# - **The optimizer made before sharding**: it updates parameters that the model no longer has.
# - **Only the root wrapped**: everything is gathered at once, and nothing hides it.
# - **The root forgotten**: embeddings are whole, and each rank trains its own.
# - **One checkpoint around the model**: backward needs all activations at once.
# - **Numbers not drawn after `to_empty`**, or with one seed on all ranks.
# - **Only parameters saved**: training goes on without its moments.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., VLDB 2023, section 3 | What does a unit's size decide, and what its order? |
# | [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) | PyTorch | What does `reshard_after_forward=8` mean on two nodes? |
# | [AMP examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html) | PyTorch | Why is `unscale_` called before clipping, and which line of exercise 4.9 is that? |

# %% [markdown]
# ## What comes next
#
# Notebook **05 FSDP profiling**: where does the time of a step go, and which communication is
# exposed?
