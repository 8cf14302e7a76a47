# %% [markdown]
# # 07c · Optional: sharding in JAX
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 25 minutes |
# | **Needs** | any machine with 2 cores; no GPU; JAX (the extra `jax`) |
#
# In JAX you state the layout of each array, and the compiler derives the collectives. Here you state
# the layouts of DDP, FSDP and tensor parallelism, and compare the collectives with torch's. No later
# notebook needs this one.
#
# Read [07a](07a_tensor_parallel.ipynb) before it, up to exercise 7.2.

# %% [markdown]
# ## You will be able to
#
# - write a layout as a `PartitionSpec`, and read it in the type of an array;
# - say which missing collectives JAX refuses, and which it adds;
# - state the layouts of DDP, FSDP and tensor parallelism, and say which collectives they imply.

# %%
import torch
import torch.distributed as dist

import labs
import labs.sharding_in_jax as lab

labs.warm_up()

# %% [markdown]
# ## A missing collective in torch
#
# A torch tensor does not say whether it is complete, a shard, or one rank's part of a sum. So a
# missing collective raises no error. Below, a block of two matrix products, y = relu(x·up)·down, is
# sharded over 4 ranks as in exercise 7.2: columns of `up`, rows of `down`. `lab.block_arrays()` returns
# its three arrays.

# %%
print({name: array.shape for name, array in lab.block_arrays().items()})

# %% [markdown]
# This block needs two sums over ranks, which Megatron-LM calls f and g (exercise 7.1). g sums y in forward
# and does nothing in backward. f does nothing in forward, and sums the gradient of x in backward. The
# cell leaves out both, then f only.

# %%
def left_out(with_sum):
    """Loss and gradient of x on this rank; nobody sums the gradient, and y only `with_sum`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, up, down = (torch.tensor(a, device=labs.device()) for a in lab.block_arrays().values())
    x.requires_grad_()
    y = torch.relu(x @ up.chunk(ranks, 1)[rank]) @ down.chunk(ranks)[rank]
    if with_sum:  # in forward the sum, in backward nothing: g
        total = y.detach().clone()
        dist.all_reduce(total)
        y = y + (total - y).detach()
    loss = y.square().mean()
    loss.backward()
    return loss.item(), x.grad.cpu().numpy()

in_torch = [labs.launch(left_out, with_sum, ranks=4) for with_sum in (False, True)]
print("losses without the sum of y:", *(f"{loss:.3f}" for loss, _ in in_torch[0]))

# %% [markdown]
# ## Layouts as types
#
# In **JAX** the layout is a part of an array's type. Devices form a mesh with named axes, here one
# axis "n". A **`PartitionSpec`**, written `P`, names for each dimension of an array the axis that
# shards it: `P(None, "n")` shards columns, `P("n")` rows, `P()` nothing.

# %% [markdown]
# `lab.run_jax` calls a function in a process of its own, which has 4 CPU devices. There
# `lab.place_arrays` puts the block's arrays on the mesh. If JAX is not installed, the cell says how to
# install it.

# %%
def types():
    import jax
    from jax.sharding import PartitionSpec as P
    jax.set_mesh(jax.make_mesh((4,), ("n",)))
    x, up, down = lab.place_arrays({"x": P(), "up": P(None, "n"), "down": P("n")})
    h = jax.nn.relu(x @ up)
    print("x", jax.typeof(x), "@ up", jax.typeof(up), "→ h", jax.typeof(h))
    print("h @ down, replicated:", jax.typeof(jax.numpy.matmul(h, down, out_sharding=P())))
    h @ down

lab.run_jax(types)

# %% [markdown]
# `256@n` means that axis "n" shards these 256 columns. JAX inferred the type of h. It refuses
# `h @ down`: both are sharded along the dimension that the product sums over, so each device has only
# a partial sum. `out_sharding=P()` says that y must be replicated, and this implies the all-reduce.

# %% [markdown]
# ## shard_map: explicit collectives
#
# `shard_map` is closer to torch: its function sees the shards of one device and calls collectives
# itself; `psum` is the all-reduce. Its types say along which axes the values differ
# between devices. Here are the same two omissions as in torch.

# %%
def in_pieces(with_sum):
    """Loss and gradient of x, as in left_out: nobody sums the gradient, and y only with_sum."""
    import jax
    from jax.sharding import PartitionSpec as P
    jax.set_mesh(jax.make_mesh((4,), ("n",)))

    def on_each_device(x, up, down):
        y = jax.nn.relu(x @ up) @ down
        return jax.lax.psum(y, "n") if with_sum else y

    block = jax.shard_map(on_each_device, out_specs=P())
    x, up, down = lab.place_arrays({"x": P(), "up": P(None, "n"), "down": P("n")})
    return jax.value_and_grad(lambda x: (block(x, up, down) ** 2).mean())(x)

in_jax = [lab.run_jax(in_pieces, with_sum) for with_sum in (False, True)]
in_jax[0]

# %%
lab.show_omitted_sums(in_torch, in_jax)

# %% [markdown]
# torch raises no error without either sum. In JAX `out_specs=P()` promises the same y on all devices,
# and the types cannot confirm that without `psum`. The sum of the gradient needs no line. Where
# each device uses the replicated x with its own weights, JAX inserts a cast to a *varying* value, which is
# f: its backward is `psum`.

# %% [markdown]
# In your own code the cast is `jax.lax.pcast(x, "n", to="varying")`. Its older name is
# `jax.lax.pvary`: JAX 0.10 removed that function, but a printed jaxpr still says `pvary`. The backward of
# `psum` is this cast, so `psum` is g.
#
# `check_vma=False` switches these types off; then JAX is as silent as torch.

# %% [markdown]
# ## Layouts of DDP, FSDP and tensor parallelism
#
# With `shard_map` you write the collectives. Without it you state only where each array is, and the
# compiler derives them. The same program then trains as DDP, as FSDP or with tensor parallelism.

# %% [markdown]
# ### Exercise 7.26 · Layouts of DDP, FSDP and TP
#
# *Difficulty 2 of 5 · 10 minutes · target: each device has the shards of DDP, FSDP and TP; the
# compiled program has their collectives and no others*
#
# The program never changes: `h = relu(x @ up)`, then `y = matmul(h, down, out_sharding=...)` with
# your spec of y. x and y have 1024 rows, the tokens, and 64 columns. The layout of h follows from those of
# x and `up`.

# %% [markdown]
# `layouts()` returns a dict with the keys `"DDP"`, `"FSDP"` and `"TP"`. The value of each is a dict with
# the keys `"x"`, `"up"`, `"down"` and `"y"`, whose values are specs.

# %%
# Exercise 7.26: where each array lies, for three kinds of training
def layouts():
    """Layout -> array -> PartitionSpec, on a mesh with one axis "n"."""
    from jax.sharding import PartitionSpec as P
    ### BEGIN SOLUTION
    return {"DDP": {"x": P("n"), "up": P(), "down": P(), "y": P("n")},
            "FSDP": {"x": P("n"), "up": P("n"), "down": P("n"), "y": P("n")},
            "TP": {"x": P(), "up": P(None, "n"), "down": P("n"), "y": P()}}
    ### END SOLUTION

# %%
lab.check_layouts(layouts)

# %%
lab.show_layouts(layouts)

# %% [markdown]
# ## Collectives that the compiler derives
#
# FSDP and TP may have the same shards of `down`; the difference is h. Sharded by tokens, h
# needs all of `down`, so the weight is communicated. Sharded by columns, h needs only the rows that its
# device has, so the sum is communicated. A wrong spec changes shards and traffic, never the loss.

# %% [markdown]
# How many kB will the devices all-reduce under TP, in forward and backward together? y and x have
# 1024 · 64 elements of 4 bytes.

# %%
# A guess, for exercise 7.26
### BEGIN SOLUTION
my_guess = 524
### END SOLUTION
labs.guess("7.26", "kB that TP all-reduces in forward and backward", my_guess)

# %%
lab.show_collectives(layouts)

# %% [markdown]
# DDP and TP need the same in both. FSDP does not: on a CPU, JAX's compiler XLA forms no
# reduce-scatter here. So each device receives the complete sum of the gradients, twice the traffic, and keeps
# its shard. For GPUs it forms one. XLA also gathers each weight once where torch gathers twice,
# because it keeps gathered weights, and their memory, until backward. Under `jax.checkpoint` it gathers
# twice, too.

# %% [markdown]
# ## A mesh of two axes
#
# Two axes need no new code, only two names. On 2 × 4 devices: FSDP along "data", TP along "tensor".

# %%
def fsdp_and_tp():
    from jax.sharding import PartitionSpec as P
    return {"FSDP × TP": {"x": P("data"), "up": P("data", "tensor"),
                          "down": P("tensor", "data"), "y": P("data")}}

lab.show_layouts(fsdp_and_tp, {"data": 2, "tensor": 4})

# %% [markdown]
# Each device has an eighth of the weights. The four devices of a row of the mesh
# compute on the same half of the tokens. The run on 2 × 2 × 2 ranks in
# [07b](07b_pipeline_parallel.ipynb) has one more dimension, the pipeline. No spec expresses it: a spec
# says *where* an array is, a schedule *when* it is computed.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | JAX refuses a product as ambiguous | both sides are sharded along the dimension that it sums over |
# | JAX refuses a layout as illegal | one axis shards both dimensions of an array |
# | right losses, and more bytes than expected | a spec names another dimension than you meant |
# | `jax.lax.pvary` does not exist | JAX 0.10 removed it: `jax.lax.pcast` |

# %% [markdown]
# ## I can …
#
# - read `float32[1024,256@n]`, and write its `PartitionSpec`
# - say why `h @ down` is refused, and what `out_sharding=P()` implies
# - find f and g in a program with `shard_map`
# - derive the collectives of DDP, FSDP and tensor parallelism from their specs

# %% [markdown]
# ## What to read
#
# - JAX's documentation, *[Explicit sharding](https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html)*:
#   which operations does it refuse, and what must be given then?
# - JAX's documentation, *[Manual parallelism with
#   shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html)*: which bug in `out_specs` does the
#   type of varying values find?
# - Xu et al., *[GSPMD](https://arxiv.org/abs/2105.04663)*, 2021, section 3: what does the compiler do
#   with a tensor that has no annotation?

# %% [markdown]
# ## What comes next
#
# **[07d](07d_sharded_muon.ipynb)** is optional, too: an optimizer that may not be sharded anywhere. Then
# **08** kills ranks, and training continues.
