# %% [markdown]
# # 04 · FSDP
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 230 minutes in two sittings (85 + 145), 60 more for optional parts |
# | **Needs** | 2 cores. On GPUs everything is measured on them. One GPU shows memory; speed needs several |
#
# Fully sharded data parallelism (FSDP) is PyTorch's implementation of ZeRO-3. You apply
# `fully_shard`, check the result, and choose its units. Then you train a model that runs out of
# memory with DDP.

# %% [markdown]
# <details><summary>On one GPU</summary>
#
# All ranks share the GPU and communicate through gloo. Memory per rank and bytes sent are the same
# as on a node with several GPUs. Times are not. In the billion-parameter lab, one rank of eight runs
# on your GPU: its memory is real, its speed says nothing about a node.
#
# </details>

# %% [markdown]
# ## You will be able to
#
# - shard a transformer with `fully_shard`, and say what each rank stores and sends;
# - choose units by their collectives, their memory and their waiting time;
# - predict the largest model that fits, and find it by trial;
# - use activation checkpointing and mixed precision, and say what they save and cost.

# %% [markdown]
# ## Model and ranks
#
# You train a GPT-2 on as many ranks as suit this machine. The second cell prints the sizes. You can
# change any of them. The checks use a smaller model, so that they take seconds.
#
# The first launch takes longer, because every rank has to import torch.

# %%
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

import labs
import labs.fsdp as lab

# %%
labs.warm_up()
PRESET = lab.preset()  # or lab.preset("laptop", ranks=4): any size can be changed
PRESET

# %% [markdown]
# ## From ZeRO-3 to `fully_shard`
#
# With fp32 and AdamW, every DDP rank needs 112 GB for a model of 7 billion parameters. That is more
# than an H100 has. Sharded over 8 ranks, each rank needs 14 GB.

# %% [markdown]
# `fully_shard(module)` makes a module a **unit**. Its parameters become shards (`DTensor`). FSDP
# all-gathers them just before the unit's forward and backward, and frees the gathered parameters
# afterwards. It reduce-scatters the unit's gradients.
#
# A parameter belongs to the first unit that claims it. So shard the inner modules first, and the
# **root** (the model itself) last.

# %% [markdown]
# `fully_shard(module, mesh=mesh)` returns the same module, with *new* parameters. The mesh names the
# ranks that share one model. `lab.device()` is this rank's device:

# %%
def one_unit():
    mesh = init_device_mesh(lab.device().type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    linear = fully_shard(torch.nn.Linear(6, 4), mesh=mesh)
    sizes = f"full: {tuple(linear.weight.shape)}, shard: {tuple(linear.weight.to_local().shape)}"
    return sizes, lab.mesh() == mesh


labs.launch(one_unit, ranks=2)

# %% [markdown]
# `lab.mesh()` returns that mesh of all ranks, and creates it only once. Use it in the exercises:
# later the same code runs on another mesh.

# %% [markdown]
# Make a guess before you build it. A DDP rank stores 16Ψ bytes and its buckets. If everything is
# sharded, how many MB does one rank store after backward? The next cell prints Ψ, the number of
# parameters of the preset's GPT-2. The preset above says how many ranks there are.

# %%
PSI = PRESET.parameters
f"Ψ = {PSI / 1e6:.1f} million"

# %%
# A guess, for exercise 4.1
### BEGIN SOLUTION
my_guess = round(10 * PSI / 1e6)
### END SOLUTION
labs.guess("4.1", "MB per rank after backward, fully_shard", my_guess)

# %% [markdown]
# ### Exercise 4.1 · One unit per block
#
# *Difficulty 2 of 5 · 10 minutes · target: every block is gathered twice a step, in a collective
# of its own, and freed in between*
#
# `lab.blocks(model)` returns the list of transformer blocks: GPT-2's `model.transformer.h`, and the
# list of the same meaning in other models. All parameters outside the blocks belong to the root.

# %%
# Exercise 4.1: one unit per block; all other parameters belong to the root
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
# The check trains a GPT-2 of width 33 on 2 and on 4 ranks. Neither divides 33. It compares the
# parameters with a reference: one process that trains on the full batch. Then it counts bytes by
# category and collectives by kind, and looks at which parameters are still gathered after forward.

# %% [markdown]
# Now compare `shard` with the ZeRO-3 that you built. The next cell takes your `zero3` from notebook
# 03 and checks it. If it does not pass, the cell uses the worked solution.

# %%
zero3 = lab.your_zero3()
zero3

# %%
lab.show_beside_zero3(zero3, shard, PRESET)

# %% [markdown]
# **Notice:** `fully_shard` *is* your ZeRO-3, with one all-gather fewer.
#
# The black ticks are ZeRO's formulas for stages 0 and 3: 16Ψ and 16Ψ/N bytes, 2Ψ and 3Ψ elements.
# The missing all-gather is the root's, which stays gathered from forward to backward. With the root
# freed in between, `fully_shard` makes the same calls with the same bytes. DDP's buffers are its
# buckets, a second copy of the gradients.

# %% [markdown]
# ## Choosing FSDP units (wrapping)
#
# If the model is a single unit, everything is gathered at once: for 7 billion parameters in fp32, 28 GB
# of parameters, and as much again in the buffer in which they arrive. If each linear layer is a unit,
# little is gathered at once, but a step has many collectives.

# %% [markdown]
# In one step:
#
# - the root is all-gathered once, because it stays gathered until backward ends;
# - every other unit is all-gathered twice;
# - every unit is reduce-scattered once.
#
# The chart above has one unit per block. How many collectives will a step have with one unit for
# each of a block's four linear layers? The preset above says how many blocks the model has.

# %%
# A guess, for exercise 4.2
### BEGIN SOLUTION
my_guess = 10 * PRESET.layers
### END SOLUTION
labs.guess("4.2", "collectives per step, each linear", my_guess)

# %% [markdown]
# How many bytes are gathered at once? Each unit arrives in one flat buffer. Its parameters are then
# *copied out* of that buffer. In forward, FSDP frees a unit's buffer only after the next unit has
# been copied out, so that the copy overlaps with the next all-gather.

# %% [markdown]
# Memory is largest just after a unit has been copied out. Then four things are allocated:
#
# | allocated | freed |
# |:--|:--|
# | the root's parameters | after backward |
# | the flat buffer of the previous unit | now |
# | this unit's flat buffer | when the next unit has been copied out |
# | this unit's parameters | after its forward |
#
# The root is gathered first, so it is the *previous unit* of the first block.

# %% [markdown]
# The wrapping with the fewest collectives is *not* the fastest, because a rank waits for all-gathers.
# Seconds that nothing hides are **exposed**:
#
# | all-gather of | exposed seconds |
# |:--|:--|
# | the root | all: nothing computes |
# | the first unit | all: the root computes hardly anything |
# | each further unit | those that the previous unit's forward does not hide, never below zero |
#
# `gather(n)` returns the seconds of an all-gather of n parameters. `compute(n)` returns the seconds
# of forward of a unit with n parameters. Over PCIe:

# %%
def gather_on_pcie(parameters):
    return 20e-6 + 4 * parameters / 16e9


gather_on_pcie(100e6)

# %% [markdown]
# ### Exercise 4.2 · The cost of a wrapping
#
# *Difficulty 3 of 5 · 25 minutes · target: collectives, bytes and exposed seconds for eight lists of
# units on four machines; then the measured bytes of three real wrappings*
#
# Go through the units in the order of forward. Before the first unit, the root itself is copied out:
# its buffer and its parameters are allocated. The root may be the only unit. Backward never needs
# more memory.

# %%
# Exercise 4.2: the cost of a wrapping
def cost(units, gather, compute):
    """units: parameters of each unit, the root's first, then in the order of forward. Returns
    (collectives of a step, bytes gathered at once in fp32, exposed seconds of a forward)."""
    ### BEGIN SOLUTION
    root, *others = units
    collectives = 1 + 2 * len(others) + len(units)
    gathered, exposed = 2 * root, gather(root)
    before, hidden = root, 0
    for unit in others:
        gathered = max(gathered, root + before + 2 * unit)
        exposed += max(0, gather(unit) - hidden)
        before, hidden = unit, compute(unit)
    return collectives, 4 * gathered, exposed
    ### END SOLUTION


# %%
lab.check_cost(cost)

# %% [markdown]
# <details><summary>Hint</summary>
#
# One loop over the units after the root is enough. It needs two values of the previous unit: its
# size, and the seconds of its forward, in which the next all-gather is hidden. For the first unit,
# the previous one is the root, and nothing is hidden.
#
# The bytes are a maximum over the units. The exposed seconds are a sum.
#
# </details>

# %% [markdown]
# Now measure three wrappings. GPT-2's linear layers have the class `Conv1D`:

# %%
def linears(model):
    from transformers.pytorch_utils import Conv1D

    return [module for module in model.modules() if isinstance(module, Conv1D)]


wrappings = {"whole model": lambda model: [], "each block": lab.blocks, "each linear": linears}
lab.show_wrappings(wrappings, PRESET, cost)

# %% [markdown]
# **Notice:** from one unit for the model to one per block, the gathered bytes shrink most. From
# blocks to linear layers, the number of collectives grows most.

# %% [markdown]
# On a CPU, the measured bytes equal your `cost` exactly. With a single unit, shards, buffer and
# gathered parameters together take more than twice what the unsharded parameters would. For the chart,
# the ranks train 2 sequences each, fewer than the preset's, so that activations do not hide the
# buffers.

# %% [markdown]
# Which wrapping is fastest? The next table uses your `cost` for Llama-2-7B on three links. It adds an
# overhead of 50 µs per all-gather, for the launch and the copies. Decide before you run the cell: is
# the same wrapping best over NVLink and over 100 GbE?

# %%
lab.show_exposed(cost)

# %% [markdown]
# **Notice:** one unit for the whole model loses the most time on every link, although it needs the
# fewest collectives.
#
# One unit per block is the usual choice. Over NVLink it avoids 91 % of that loss; one unit per
# linear layer avoids 82 %. Over 100 GbE every wrapping waits for the link: with each of the last
# three, a forward loses 1.48 to 1.49 s. In notebook 05 you find both mistakes in traces: one huge
# unit, and tiny units.

# %% [markdown]
# ## Gradient accumulation with FSDP
#
# A batch that does not fit into memory is split into micro-batches. Their gradients are accumulated
# before one optimizer step. By default, FSDP reduce-scatters after every micro-batch.
#
# `module.set_requires_gradient_sync(False)` is FSDP's `no_sync`: each rank keeps *unsharded* gradients
# until the last micro-batch. `set_reshard_after_forward(False)` and `set_reshard_after_backward(False)`
# keep the parameters unsharded too. In the table's first two rows both are `True` for all units, so the
# root is gathered twice, too. The cell takes up to a minute.

# %%
lab.show_gradient_accumulation(shard, PRESET)

# %% [markdown]
# **Notice:** less communication costs memory. Reducing once sends fewer bytes, but each rank stores
# 4Ψ bytes of gradients instead of 4Ψ/N.
#
# If the parameters are never freed either, FSDP sends as much as DDP. It then saves memory only on
# the optimizer state, as ZeRO-1 does. So with little memory, reduce after every micro-batch.

# %% [markdown]
# ## Training under a memory limit
#
# From now on each rank has a **limit**: `launch(..., memory_limit=bytes)`. A rank may allocate that
# many bytes beyond what it has at the start. The allocation that would exceed the limit fails.
#
# On a CPU all writable memory counts, including Python objects and thread stacks. On a GPU the limit
# is on what torch's allocator reserves.
#
# The ranks train a GPT-2 of this size, first with DDP, then with your `shard`:

# %%
def ddp(model, optimizer_class, **settings):
    module = DistributedDataParallel(model)
    return module, optimizer_class(module.parameters(), **settings)


LIMIT = lab.memory_limit()  # bytes per rank: by formula enough for FSDP, too little for DDP
lab.preset(lab="limit")

# %%
lab.show_training_under_limit({"DDP": ddp, "FSDP": shard}, LIMIT)

# %% [markdown]
# **Notice:** DDP runs out of memory; FSDP trains the same model on the same data under the same
# limit.
#
# The hatched bar is the memory that DDP would need, by formula. The red line is the limit. DDP's
# allocation was refused there, on a CPU by the operating system. FSDP's measured bar ends at the
# formula's tick.

# %% [markdown]
# ## Activation checkpointing
#
# In the last picture, activations are the largest part of FSDP's bar. **Activation checkpointing**
# stores only a block's input, and recomputes the block's forward in backward.
#
# Checkpoint each block separately. A single checkpoint around the model would recompute, and store,
# all activations at once.

# %% [markdown]
# | call | returns |
# |:--|:--|
# | `checkpoint_wrapper(block)` | a *new* module around the block; the block itself does not change |
# | `lab.blocks(model)` | the model's own `ModuleList`: a block that you replace there is replaced in the model |

# %%
layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
layers[0] = checkpoint_wrapper(layers[0])
layers

# %% [markdown]
# ### Exercise 4.4 · Activation checkpointing for every block
#
# *Difficulty 2 of 5 · 10 minutes · target: after forward, only each block's input is stored*

# %%
# Exercise 4.4: activation checkpointing for every block
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
# What does it save, and what does it cost? The next cell trains the model of the last picture without
# a limit, under three strategies. It measures memory, counts arithmetic, and repeats each run five
# times for speed. It takes up to a minute.

# %%
compared = lab.compare_strategies(
    {"DDP": ddp, "FSDP": shard, "FSDP + checkpointing": checkpointed})
lab.show_memory_and_arithmetic(compared)

# %% [markdown]
# **Notice:** "three times less memory for a third more time" is not what was measured. The lines
# below the chart give this run's numbers.
#
# - *Three times* counts activations only. The factor grows with the number of layers, because only
#   one block has all its activations at a time.
# - *A third* assumes a complete second forward: 4 instead of 3 units of work, as backward costs two.
#   torch recomputes less: not a block's last matrix product, and not the head.

# %% [markdown]
# ## CPU offload
#
# With **CPU offload**, shards, gradients and optimizer state are in the host's memory. When a unit is
# gathered, each rank copies its shard to the GPU. The shard of the gradient is copied back.
#
# **Pinned memory** makes these copies faster, because the operating system never moves it. It needs
# a GPU.

# %%
def offloaded(model, optimizer_class, **settings):
    policy = CPUOffloadPolicy(pin_memory=lab.device().type == "cuda")
    for block in lab.blocks(model):
        fully_shard(block, mesh=lab.mesh(), offload_policy=policy)
    fully_shard(model, mesh=lab.mesh(), offload_policy=policy)
    return model, optimizer_class(model.parameters(), **settings)


lab.show_offload(shard, offloaded)

# %% [markdown]
# Copies over PCIe take time. How long do they take, compared with the step's computation? The next
# table is computed for 7 billion parameters:

# %%
lab.show_offload_on_gpus()

# %% [markdown]
# **Notice:** from the T4 to the B200, computing became 35 times faster, but PCIe only 4 times. So the
# copies take 10 % of the computing time on the T4, and 86 % on the B200.
#
# With more tokens in a step the share shrinks, because the bytes stay the same. Computation can hide
# the copies. It cannot hide AdamW on the host: for eight A100s AdamW takes 1.5 s, longer than their
# 1.33 s of computing.

# %% [markdown]
# ## The largest model that fits
#
# How many times more parameters can you train with FSDP and checkpointing than with DDP, on the same
# number of ranks and under the same limit?

# %%
# A guess, drawn in the chart of the largest models
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("4.4", "times larger than with DDP, FSDP + checkpointing", my_guess)

# %% [markdown]
# `lab.largest_model` first *predicts* how many layers fit. It adds up the bytes of all tensors, with
# the formulas of notebook 01's explorer, and the other memory of a rank, which it measures in two
# runs without a limit.
#
# Then it trains real models under the limit, until one fits and the model with one more layer runs out
# of memory. Each of the next cells takes 5 to 30 seconds, on 8 GPUs up to two minutes.

# %%
largest_ddp = lab.largest_model("DDP", ddp, LIMIT)
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
lab.show_summary(compared, largest_ddp, largest_fsdp, largest_checkpointed)

# %% [markdown]
# **Notice:** the last column is the difference between prediction and trial. A formula is cheaper
# than a job that runs out of memory.
#
# FSDP's gain grows with the number of ranks, because model states shrink as 1/N. Activations do not
# shrink, so checkpointing has to reduce them. With many ranks a new limit appears: each rank builds
# the full model before it is sharded. Tokens per second are this machine's. On a CPU they say little
# about a GPU.

# %% [markdown]
# ## Mixed precision
#
# Under FSDP with checkpointing, what is left besides the shards is activations and gathered parameters.
# In 16 bits they take half the memory.
#
# A `MixedPrecisionPolicy` has two dtypes. `param_dtype` is the dtype in which parameters are gathered
# and used. `reduce_dtype` is the dtype in which gradients are communicated and summed. The shards
# that the optimizer updates keep the model's dtype, fp32.

# %% [markdown]
# bf16 has the range of fp32 but only 8 bits of precision, so 256 + 1 is 256. A sum over many ranks
# loses its small terms.

# %%
MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # reduce_dtype=None: the same dtype

# %% [markdown]
# An all-reduce of Ψ gradients in fp32 moves 4 + 4 bytes per parameter, in two passes. FSDP gathers
# twice and reduces once. How many bytes per parameter does FSDP move, if it computes in bf16 and
# sums in fp32?

# %%
# A guess, for exercise 4.5
### BEGIN SOLUTION
my_guess = 6
### END SOLUTION
labs.guess("4.5", "bytes moved for each parameter, bf16 and fp32 sums", my_guess)

# %% [markdown]
# ### Exercise 4.5 · Compute in bf16, reduce in fp32
#
# *Difficulty 2 of 5 · 10 minutes · target: parameters gathered in bf16, gradients reduced in
# fp32; the units of exercise 4.1*
#
# Compute in bf16, but keep full precision in sums and updates.

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
# **Notice:** activations and gathered bytes halve; shards and optimizer state do not change.
#
# Two all-gathers in bf16 and a reduce-scatter in fp32 make 2 + 2 + 4 bytes per parameter, as many as
# an fp32 all-reduce. The chart shows slightly less, because the root is gathered only once. Reducing
# in bf16 would save another quarter, but lose precision.

# %% [markdown]
# ## fp16: underflow and loss scaling
#
# fp16 has more precision than bf16, but a small range: its smallest positive number is 6e-8. A
# micro-batch of 256 tokens in a batch of 262,144 contributes 1/1,024 of the loss, so its gradients
# are small. How many become zero?

# %%
lab.show_underflow()

# %% [markdown]
# **Notice:** in fp16, gradients **underflow** to zero. With the loss multiplied by 65,536 they are not
# zero. This is **loss scaling**. The gradients must be divided by the same factor before the
# optimizer step.
#
# bf16 has the range of fp32 and needs no loss scaling: scaling does not reduce its zeros. These
# zeros are sums that cancel exactly after rounding.

# %% [markdown]
# ## Second sitting · 145 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 4.6, 4.7, 4.8, 4.9, 4.11, 4.13 |
# | **Optional** | 4.12 |
# | **In a new kernel** | run the cells of imports, `PRESET`, exercises 4.1, 4.4 and 4.5, and `offloaded` |
#
# You will be able to:
#
# - initialise a model that no rank stores unsharded;
# - save a sharded checkpoint, and resume on other ranks;
# - find bugs of a training loop by measuring;
# - compute what scaling and offload cost;
# - write an FSDP script for `torchrun`.

# %% [markdown]
# ## Hybrid sharding (HSDP)
#
# Take two nodes with 8 A100s each. NVLink carries 300 GB/s per GPU inside a node. The network between
# nodes carries a tenth of that or less.
#
# **HSDP** (hybrid sharding) keeps all-gathers inside a node. Its mesh has two dimensions, `replicate`
# and `shard`. The ranks of one row shard a model; each row is a replica. Gradients are
# reduce-scattered inside a row, and each shard is all-reduced between rows.

# %% [markdown]
# Only the mesh changes. In the next cell `lab.mesh()` has two dimensions:
# `init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))`. Your `shard` runs
# unchanged.

# %%
lab.show_hsdp(shard, PRESET)

# %% [markdown]
# With two replicas each rank stores twice as much, and gathers from half as many ranks. Only the
# all-reduce goes between replicas. It carries one shard of the gradients, where FSDP over all ranks has
# two all-gathers and a reduce-scatter of the full model.

# %% [markdown]
# ## Initialising on the meta device
#
# So far every rank built the full model first. For 7 billion parameters in fp32 that takes 28 GB per
# rank, and 8 times that per node.
#
# A tensor on the **meta device** has a shape but no memory. So build the model there, shard it, and
# only then allocate shards and buffers with `to_empty`.

# %% [markdown]
# `to_empty` does not initialise them: shards and buffers contain arbitrary values until you initialise
# them. On a CPU every rank has its own generator, so equal seeds give equal shards.

# %% [markdown]
# | call | does |
# |:--|:--|
# | `model.to_empty(device=...)` | allocates this rank's shards and the buffers, here on `lab.device()` |
# | `lab.mesh().get_local_rank("shard")` | returns this rank's index among the shards |
# | `model._init_weights(module)` | initialises parameters and buffers of one module |
# | `model.apply(function)` | calls `function(module)` for each module, children first |
#
# torch's layers initialise themselves in `reset_parameters()`. In Hugging Face's models, the model
# does it. The order matters: GPT-2 initialises the last layer of attention and MLP a second time, with
# a smaller standard deviation.

# %%
with torch.device("meta"):
    shape_only = torch.nn.Linear(4, 4)
shape_only.weight.device, shape_only.to_empty(device="cpu").weight.device

# %% [markdown]
# ### Exercise 4.6 · Sharded initialisation
#
# *Difficulty 4 of 5 · 25 minutes · target: each rank allocates only its shards; shards differ, replicas
# are equal, and the values have the model's own distribution*
#
# The check builds GPT-2 and a Qwen2 whose embedding and head share a weight (tied weights). It uses a
# mesh of 4 shards and one of 2 × 2. Calling `to_empty` before `shard` would untie the weights.

# %%
# Exercise 4.6: sharded initialisation
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
# There are five steps of one or two lines: build, shard, allocate, initialise, create the optimizer.
# Two ranks with the same index among the shards have the same shard, one in each replica. Which seed
# do they need?
#
# Create the optimizer after sharding, because `fully_shard` replaces the parameters. `to_empty` and
# the initialisation keep the parameter objects and only fill them.
#
# </details>

# %% [markdown]
# `model.init_weights()` looks shorter, but it is wrong here. For custom classes, Hugging Face's method
# skips modules that have no parameters of their own, and `fully_shard` changes the model's class. So
# GPT-2's smaller standard deviation is silently lost. The check measures it.

# %% [markdown]
# ## Sharded checkpoints (DCP)
#
# A **full** state dict gathers everything on one rank. A **sharded** state dict stays sharded, and
# each rank writes its own shards.
#
# | call | does |
# |:--|:--|
# | `get_state_dict(module, optimizer)` | returns two dictionaries with this rank's shards |
# | `dcp.save(state, checkpoint_id=folder)` | writes them; `dcp.load` *fills* such dictionaries |
# | `set_state_dict(module, optimizer, model_state_dict=..., optim_state_dict=...)` | loads both into module and optimizer, including the learning rate |
#
# All ranks must call these functions together.

# %%
def names_of_a_state():
    module = fully_shard(torch.nn.Linear(2, 2), mesh=lab.mesh())
    weights, state = get_state_dict(module, torch.optim.AdamW(module.parameters()))
    return list(weights), list(state)


labs.launch(names_of_a_state, ranks=2)[0]

# %% [markdown]
# ### Exercise 4.7 · Save on 4 ranks, load on 2
#
# *Difficulty 3 of 5 · 15 minutes · target: each rank writes its shards, nothing is gathered, and
# training continues as if it had not stopped*

# %%
# Exercise 4.7: save on 4 ranks, load on 2
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
# Both functions need a dictionary of the same form: one entry for the model, one for the optimizer,
# under two keys that you choose. `dcp.load` writes into existing tensors. So `load` begins with the
# state of the module that is to be filled, and ends by setting it. A new optimizer has no moments
# yet; `get_state_dict` creates them.
#
# </details>

# %%
lab.show_state_dicts(shard)

# %% [markdown]
# The full state dict is on rank 0 only, and must fit into that rank's memory. Other programs can read
# it. It contains the tied weight twice, once under each name, so it is larger than all shards
# together. To resume training on any number of ranks, the sharded one is enough.

# %% [markdown]
# ## FSDP1 (`FullyShardedDataParallel`)
#
# `fully_shard` (FSDP2) replaces `FullyShardedDataParallel` (FSDP1). FSDP1 wraps the module instead of
# changing it, and puts each unit's parameters into one flat parameter. It is *deprecated*, says
# PyTorch's *[tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP1_tutorial.html)*, but
# older code still uses it. The next table has its names, their successors, and what one step of each
# sent.

# %%
lab.show_fsdp1_names()

# %% [markdown]
# `SHARD_GRAD_OP` gathers once instead of twice. `NO_SHARD` gathers nothing and all-reduces full
# gradients: it is DDP. In bf16 half the bytes are gathered.
#
# `BACKWARD_PRE` and `BACKWARD_POST` send the same, in another order. Only `BACKWARD_PRE` issues the
# next block's all-gather *before* this block's gradients are computed, so that computation hides it.

# %% [markdown]
# In FSDP1 an `auto_wrap_policy` chooses the units. `transformer_auto_wrap_policy` takes every module of
# given classes. `size_based_auto_wrap_policy` takes every module with at least a given number of
# parameters, so also the embedding or the head. But these share a weight, and neither may be a unit
# of its own: the cell excludes them, and what contains one of them. The chart compares both policies;
# `fsdp1` is used again below.

# %%
def fsdp1(model, optimizer_class, policy=None, **settings):
    block = type(model.transformer.h[0])
    policy = policy or partial(transformer_auto_wrap_policy, transformer_layer_cls={block})
    module = FSDP1(model, auto_wrap_policy=policy, use_orig_params=True, device_id=lab.device())
    return module, optimizer_class(module.parameters(), **settings)


def fsdp1_by_size(model, optimizer_class, parameters, **settings):
    excluded = {nn.Embedding, nn.Linear, type(model.transformer), nn.ModuleDict, nn.ModuleList}
    policy = partial(size_based_auto_wrap_policy, min_num_params=parameters,
                     exclude_wrap_modules=excluded)
    return fsdp1(model, optimizer_class, policy, **settings)


lab.show_wrap_policies(fsdp1, fsdp1_by_size, PRESET)

# %% [markdown]
# The size-based policy follows a number, not the structure of the model. With the first size, the
# blocks become units, so it has exactly the collectives of the other policy. With the smaller size,
# blocks are split into several units.

# %% [markdown]
# ## Debugging FSDP training loops
#
# Here are two pieces of code of a kind that you find in tutorials and forum answers. Both run without
# an error, and both are wrong. Measure first, then fix them.
#
# The first claims to be "a complete FSDP training loop, with gradients clipped to a norm of 0.5". The
# table shows which gradients the optimizer really used.

# %%
def found_loop(module, optimizer, batches):
    for batch in batches:
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(list(module.parameters()), max_norm=0.5)


lab.show_loop(found_loop)

# %% [markdown]
# ### Exercise 4.8 · Fix the training loop
#
# *Difficulty 2 of 5 · 10 minutes · target: the parameters of one process after 4 clipped steps*
#
# There are two mistakes. (FSDP2's gradients are DTensors, so `clip_grad_norm_` computes the global norm.
# In notebook 03 the gradients were plain tensors. For the test, each batch makes a step.)

# %%
# Exercise 4.8: the same loop, fixed
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
# The second claim: "on older GPUs use fp16 instead of bf16; everything else stays the same". Here an
# FSDP module computes in fp16. Each batch is one of many micro-batches, so its loss is multiplied by
# its `share` of the full batch. For the table's last row, one gradient on one rank is made infinite.

# %%
def found_step(module, optimizer, batch, share):
    (module(**batch).loss * share).backward()
    optimizer.step()
    optimizer.zero_grad()


lab.show_step(found_step)

# %% [markdown]
# ### Exercise 4.9 · Loss scaling for fp16
#
# *Difficulty 4 of 5 · 20 minutes · target: fewer than 1 % of the gradients underflow, and no step is
# made with an infinite gradient*
#
# A scale that keeps small gradients can make large ones infinite. Such a step must be skipped on *all*
# ranks. But each rank sees only its own shards, `p.grad.to_local()`.

# %%
# Exercise 4.9: a step in fp16
def scaled_step(module, optimizer, batch, share):
    """Forward, backward, step and zero_grad; the loss counts `share` of the full batch's."""
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
# Multiply the loss before backward, and divide every gradient after it. The optimizer must see the
# values of an unscaled step. Then test whether all local gradients are finite.
#
# All ranks must make the same decision, or their shards come from different steps. A collective that
# takes a minimum combines the ranks' answers. Clear the gradients in both cases, with a step and
# without.
#
# </details>

# %% [markdown]
# In practice `torch.amp.GradScaler` does this, also for FSDP2's shards, and adapts the scale.
#
# One last claim that you may come across: "the all-reduce of gradients takes 30 % of an FSDP step".
# There is no gradient all-reduce in an FSDP trace: gradients are reduce-scattered. In fp32, parameter
# all-gathers are about two thirds of FSDP's bytes. Only HSDP all-reduces gradients, and only their
# shards.

# %% [markdown]
# ## Training a billion parameters
#
# Now put everything together at a real size. A GPT-2 with 20 layers of width 2048 has 1.01 billion
# parameters. In fp32 with AdamW, parameters, gradients and optimizer state take 16.2 GB on every DDP
# rank, and 2.0 GB on each of 8 FSDP ranks. Activations come on top, on every rank.

# %% [markdown]
# The batch is the smallest one with which DDP runs out of memory on the given GPU. A second model is
# so large that DDP cannot store its model states with any batch. Your strategies train both. `fsdp1`,
# with one unit per block by `transformer_auto_wrap_policy`, is compared with them.

# %% [markdown]
# - On several GPUs, the next cell trains every row, one after the other. That takes about 4 minutes on
#   8 A100s.
# - On one GPU, it runs one of eight ranks alone. Tensors and memory are real, but without other ranks
#   there is no loss and no speed.
# - Without a GPU, it predicts a step on 8 A100s in four parts: computing, exposed communication,
#   optimizer and host. Here *exposed* also contains the slowdown of computation by communication.

# %%
billion = lab.billion_parameters(shard, mixed, checkpointed, offloaded, fsdp1)
lab.show_node_table(billion)

# %%
lab.show_node_steps(billion)

# %%
lab.show_node_chart(billion)

# %% [markdown]
# **Notice:** find out which part of memory is large, then choose the technique.
#
# - Sharding reduces the peak from 87.8 GB to 73.6 GB. Nearly all of the rest is activations, which
#   FSDP does not shard. bf16 halves these.
# - In the larger model, checkpointing reduces 74.3 GB to 16.6 GB. Now model states are the larger
#   part, and CPU offload removes them from the GPU.
#
# These are predictions for 8 A100s. An H200's rank used at most 0.9 % more.

# %% [markdown]
# Each technique has a cost:
#
# - FSDP sends 1.5 times DDP's bytes, and exposes 33 ms instead of 21 ms. But AdamW on an eighth of
#   the parameters saves 14 ms, so over NVLink both take equally long.
# - Checkpointing computes 25 % more.
# - CPU offload takes 58 % longer: its copies are hidden, AdamW in the host's memory is not. Use it if
#   nothing else fits.
# - 8 GPUs do the work of 7.6, because a single GPU does not communicate.

# %% [markdown]
# ## The same experiment on CPU ranks
#
# Two cores cannot compute like A100s, but they can take as long in proportion. In the next cells each
# block computes, then its rank sleeps until a *given time* has passed. Collectives use notebook 02's
# slow link, and offload's copies a link with PCIe's bandwidth.
#
# The rates are those of an A100 node, divided by two factors, so that the ratio of communication to
# computation is that of the model above.

# %%
pace = lab.slow_down(shard)
lab.show_pace(pace)

# %% [markdown]
# Memory, calls and bytes are real, under the limit that you used for DDP and FSDP. The same model of
# step time that predicted the A100s gets the rates of the slowed node. The next cell takes half a
# minute. If the experiment has run on your GPUs, the cells show its results instead.

# %%
laptop = lab.laptop_steps(pace, billion, shard, checkpointed, offloaded)
lab.show_node_table(laptop)

# %%
lab.show_node_steps(laptop)

# %%
lab.show_node_chart(laptop)

# %% [markdown]
# **Notice:** on a quiet machine, the measurement confirms which strategy is slower than which. DDP runs
# out of memory. FSDP trains that model, and one whose states DDP could never store.
#
# Checkpointing saves memory and costs computation. Offload saves more, and costs AdamW on the host.
# With more ranks, each trains fewer tokens per second. The prediction leaves out what a GPU does not have:
# gloo's own work, and four ranks on two cores.

# %% [markdown]
# ### Exercise 4.11 · Scaling efficiency, communication and offload
#
# *Difficulty 3 of 5 · 20 minutes · target: three costs of any job, exactly*
#
# - `efficiency(few, many)`: each is (GPUs, tokens of a step on all of them, its seconds). Return
#   tokens per second *per GPU* on many, divided by that on few.
# - `communication_ratio`: seconds of FSDP's fp32 collectives, divided by computing's (6 FLOPs
#   per parameter and token). `tokens` is per rank, `flops` a GPU's FLOP/s, `link` is in
#   bytes/s; the factor (N−1)/N counts here.

# %% [markdown]
# - `offload`: seconds of a rank's copies over PCIe, and seconds of AdamW on the host. The shard is
#   copied before each of two all-gathers, and its gradient is copied back, all in fp32.
#
# AdamW on a CPU consists of eight operations, one after the other. They move 80 bytes per parameter
# through the host's memory. All ranks share that memory: `host` is bytes/s for all ranks together.

# %%
# Exercise 4.11: scaling efficiency and communication
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
# First count bytes, then divide by the bandwidth of the link or memory. FSDP has three collectives
# per step, and a rank sends every part of each except its own. A rank copies only its own shard, but
# the host updates the shards of all ranks.
#
# </details>

# %% [markdown]
# The next table applies your formulas to the jobs above, with the data-sheet rates of an A100, TF32,
# NVLink, PCIe and two EPYC sockets:

# %%
lab.show_scaling_costs(efficiency, communication_ratio, offload)

# %% [markdown]
# The copies take a quarter of AdamW's time. No GPU reaches the rates of its data sheet, so the
# milliseconds in the table of the billion-parameter model are longer: it uses the utilisation of
# published runs.

# %% [markdown]
# ## Optional: `fully_shard` from scratch
#
# In notebook 03 you packed a unit's parameters into one flat tensor. A shard could then begin inside a
# row, and belonged to no single parameter. FSDP2 shards each parameter along its rows. With k = rows / N,
# rounded up, rank r stores rows r·k to (r + 1)·k. A shard keeps its parameter's name and dtype.

# %% [markdown]
# But a GPT-2 block has 12 parameters. Twelve all-gathers would pay the fixed overhead twelve times, so
# all shards of a unit are *packed* into one buffer.

# %% [markdown]
# If the last ranks have fewer rows, padding fills their part. Example: two ranks pack a weight with 3
# rows of 4 and a bias with 3 numbers. Then k is 2, each rank's buffer has 2·4 + 2·1 numbers, and rank 1
# pads 4 + 1 of them.

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
# For each parameter a unit has its unsharded tensor in `unit.unsharded`, a shard in `unit.shards`, and the
# modules that it belongs to in `unit.places`. `put` makes either list the module's parameters.
#
# The unsharded tensors stay the same objects, in bf16: 2 bytes per number. `allocate` and `free` change
# only their memory, and `is_gathered` says whether it is allocated. You built this in exercise 3.10, so
# it is given here.

# %%
def put(unit, parameters):
    for places, parameter in zip(unit.places, parameters):
        for owner, name in places:
            owner._parameters[name] = parameter


def allocate(unit):
    for w in unit.unsharded:
        w.untyped_storage().resize_(2 * w.numel())
    put(unit, unit.unsharded)
    return unit.unsharded

# %%
def free(unit):
    for w in unit.unsharded:
        w.untyped_storage().resize_(0)
    put(unit, unit.shards)


def is_gathered(unit):
    return all(w.untyped_storage().nbytes() for w in unit.unsharded)


def padded(tensor, length):  # flattened, with zeros up to this length
    return torch.nn.functional.pad(tensor.detach().flatten(), (0, length - tensor.numel()))


padded(torch.ones(1, 4), 8)  # what rank 1 packs of the weight above

# %% [markdown]
# ### Exercise 4.12 · Rows, packing, dtypes and prefetch
#
# *Difficulty 5 of 5 · 60 minutes · target: the collectives of `mixed`, call for call, and its numbers*
#
# In the cells below, `lengths` has one number per parameter: the length of a rank's padded rows.
# `order` is one list, shared by all units of a model.

# %% [markdown]
# | call | does |
# |:--|:--|
# | `dist.all_gather_single(full, piece, async_op=True)` | returns a handle; after its `.wait()`, the flat `full` has all ranks' pieces |
# | `dist.reduce_scatter_single(piece, flat)` | writes this rank's piece of the sum into `piece` |
# | `full.view(ranks, -1).split(lengths, dim=1)` | splits columns: for each parameter, the rows of all ranks |

# %%
# Exercise 4.12: what a rank stores of a unit
class Unit:
    def __init__(self, module):
        places = places_of(module)
        self.places, self.ready, self.in_flight = list(places.values()), 0, None
        self.shards, self.unsharded, self.lengths = [], [], []  # one of each for each parameter
        ### BEGIN SOLUTION
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for p in places:
            k = -(-len(p) // ranks)
            self.lengths.append(k * p[0].numel())
            self.shards.append(Shard(p.detach()[rank * k : (rank + 1) * k].clone()))
            self.unsharded.append(torch.nn.Parameter(p.detach().bfloat16()))
        free(self)
        ### END SOLUTION

# %%
# Exercise 4.12, continued: one all-gather per unit, in bf16
def start(unit):  # issues it, unless the unit is gathered or its all-gather is in flight
    ### BEGIN SOLUTION
    if not unit.in_flight and not is_gathered(unit):
        mine = torch.cat([padded(s, n) for s, n in zip(unit.shards, unit.lengths)]).bfloat16()
        full = mine.new_empty(dist.get_world_size(), len(mine))
        unit.in_flight = full, dist.all_gather_single(full.view(-1), mine, async_op=True)
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
# Exercise 4.12, continued: called when the gradient of one unsharded parameter is complete
def count(unit):
    unit.ready += 1
    if unit.ready < len(unit.unsharded):
        return
    unit.ready, ranks = 0, dist.get_world_size()
    ### BEGIN SOLUTION
    gradients = [padded(w.grad.float(), ranks * n) for w, n in zip(unit.unsharded, unit.lengths)]
    for w in unit.unsharded:
        w.grad = None
    free(unit)
    flat = torch.cat([g.view(ranks, -1) for g in gradients], dim=1).flatten()
    total = flat.new_empty(len(flat) // ranks)
    dist.reduce_scatter_single(total, flat)
    for shard, piece in zip(unit.shards, (total / ranks).split(unit.lengths)):
        piece = piece[: shard.numel()].view(shard.shape)
        shard.grad = piece.clone() if shard.grad is None else shard.grad + piece
    ### END SOLUTION

# %%
# Exercise 4.12, continued: the root's forward comes first; the root stays gathered until backward
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
    for w in unit.unsharded:
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
# Think of the buffer as a table with one row per rank and a group of columns per parameter. Each rank
# fills its row; the all-gather gives all rows. A parameter is its columns, read row by row, without
# the padding at the end. Gradients go the other way: pad, split into rows, concatenate, sum.
#
# Write to unsharded parameters through `.data`; otherwise autograd reports that a saved tensor was
# modified. Cast to fp32 before the sum over ranks. Add to a gradient of an earlier micro-batch.
#
# Prefetch: while this unit computes its gradients, the all-gather of the unit before it in forward
# should be in flight.
#
# </details>

# %% [markdown]
# ## An FSDP script for `torchrun`
#
# A job on a cluster is a file that `torchrun` starts and that writes checkpoints. You have built all
# its parts. Data, model and loop are those of `ddp.py` in notebook 02. The script imports nothing from
# this workbook.

# %% [markdown]
# ### Exercise 4.13 · `fsdp.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: the updates of one process, on 2 ranks and on 3 ranks that
# resume from the checkpoint of 2; bf16 gathered, fp32 reduced; blocks recomputed*
#
# The next cell writes the file, with three gaps. Without `--bf16` everything is fp32. Without
# `--recompute` nothing is recomputed. A resumed job begins with the epoch after the last saved one,
# also from a renamed folder, with the saved learning rate, not that of `--lr`.

# %%
lab.write_script("fsdp.py")

# %% [markdown]
# Run the check. (In `fully_shard`, `mesh` is optional: by default all ranks share the module.)

# %%
lab.check_fsdp("fsdp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: exercises 4.1, 4.4 and 4.5 in one. `checkpoint_wrapper` returns a new module. Put it into
# the model's list, and shard it instead of the block. The root needs the mixed-precision policy, too.
#
# Second and third gap: exercise 4.7, with one more entry for the number of epochs. `dcp.load` fills
# tensors in place. It replaces other values in the dictionary that you pass.
#
# </details>

# %%
lab.torchrun("fsdp.py", "--bf16", "--recompute", "--epochs", 1, ranks=2)

# %%
lab.torchrun("fsdp.py", "--resume", "fsdp_checkpoints/epoch_1", "--epochs", 2, ranks=1)

# %% [markdown]
# Two ranks wrote the checkpoint, and one rank resumed from it. The checkpoint stores tensors, whatever
# the number of ranks. It does not depend on the dtype of the all-gathers either, because shards are
# fp32.

# %% [markdown]
# ## I can …
#
# - write a job with `fully_shard`, and resume it on other ranks
# - count the collectives of a wrapping, and name the exposed all-gathers
# - say why the optimizer is created after sharding
# - predict the largest model for given ranks and memory
# - say what activation checkpointing saves and costs
# - say which bytes mixed precision halves
# - compute the cost of scaling and of CPU offload
# - initialise a model that no rank stores unsharded
# - measure whether a training loop does what it claims

# %% [markdown]
# ## How it usually goes wrong
#
# - **Optimizer created before sharding**: it updates parameters that the model no longer has.
# - **Only the root sharded**: everything is gathered at once, and nothing hides the all-gather.
# - **Root not sharded**: embeddings are replicated, and each rank trains its own copy.
# - **One checkpoint around the model**: backward needs all activations at once.
# - **Parameters not initialised after `to_empty`**, or initialised with one seed on all ranks.
# - **Only parameters saved**: training resumes without the optimizer's moments.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [PyTorch FSDP](https://arxiv.org/abs/2304.11277) | Y. Zhao et al., VLDB 2023, section 3 | What does the size of a unit decide, and what does the order of units? |
# | [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) | PyTorch | What does `reshard_after_forward=8` mean on two nodes? |
# | [AMP examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html) | PyTorch | Why is `unscale_` called before clipping, and which line of exercise 4.9 is that? |

# %% [markdown]
# ## What comes next
#
# Notebook **05 FSDP profiling**: where does the time of a step go, and which communication is
# exposed?
