# %% [markdown]
# # 07a · Tensor parallel
#
# | | |
# |:--|:--|
# | **Time** | 305 minutes in two sittings, the second from "Cut the sequence"; 30 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU |
#
# Data parallelism, FSDP included, gives each rank its own samples. Here all ranks work on the same
# tokens: each computes a part of every matrix product, of the vocabulary, of the sequence.

# %% [markdown]
# *On a CPU* the collectives, their bytes and the memory of each rank are those of a GPU node. The
# seconds are not, because here a message costs as much as the product that it belongs to.

# %% [markdown]
# ## You will be able to
#
# - cut linear layers, attention and the vocabulary over ranks so that training stays the same;
# - say which collective each cut costs, of how many bytes, and count it;
# - cut the sequence as well, and name what must be reduced, drawn or counted differently then;
# - pass keys and values around a ring, and say when gathering them or Ulysses is better.

# %%
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import labs
import labs.tensor_parallel as lab

labs.warm_up()

# %% [markdown]
# ## The need: one sequence is the least that a rank can take
#
# Under FSDP each rank needs a whole sequence of its own, and gathers whole layers. More ranks divide
# parameters, gradients and optimizer state, but neither the activations of that sequence nor a
# gathered layer. The next cell predicts the peak of one of 16,384 ranks in bf16, with every layer
# checkpointed, for sequences of 8,192 and of 131,072 tokens.

# %%
lab.show_one_sequence(ranks=16_384)

# %%
tokens = {"of one step, in millions, 1 sequence a rank": 16_384 * 8_192 / 1e6}
tokens | {"in Llama 3's largest batch, in millions": 16}

# %% [markdown]
# **Notice:** three of the four jobs exceed an H100, although the shards of parameters and optimizer
# state take less than 1 GB in each. The first job fits, but its batch has 134 million tokens. Llama 3
# was trained with 16 million at most, because far larger batches need more tokens for the same loss.
# So several ranks must share a sequence.

# %% [markdown]
# ## Two ways to divide a matrix product
#
# **Tensor parallelism** divides the matrices. For Z = tanh(X·A)·B on t ranks, cut A by columns and B
# by rows: rank i computes Zᵢ = tanh(X·Aᵢ)·Bᵢ alone, and Z is the *sum* of all Zᵢ. Between the two
# products nothing is sent. A is then a **column-parallel** layer, B a **row-parallel** one.
#
# `nn.Linear` computes x·Wᵀ, and its weight has the shape [out, in]: a column of A is a *row* of
# `weight`.

# %% [markdown]
# All ranks have the same X, and each computes a part. Is autograd's gradient of X then right on each
# rank? Two ranks try, with A cut by columns:

# %%
def gradient_of_the_input(parts):
    torch.manual_seed(0)
    x = torch.randn(1, 3, requires_grad=True)
    weight = torch.randint(-9, 10, (4, 3)).float()
    rows = weight.chunk(2)[dist.get_rank()] if parts else weight
    F.linear(x, rows).sum().backward()
    return x.grad[0].tolist()


part = labs.launch(gradient_of_the_input, True, ranks=2, quiet=True)
whole = labs.launch(gradient_of_the_input, False, ranks=2, quiet=True)
{"rank 0": part[0], "rank 1": part[1], "whole": whole[0]}

# %% [markdown]
# **Notice:** each rank has only its part of the gradient, and the parts add up to the whole one. No
# error says so: each part looks like a gradient.

# %% [markdown]
# ## f and g
#
# So each end of the divided region needs a collective, in one direction only. Megatron-LM calls the
# two functions f and g; they are a **conjugate pair**:
#
# | | where | forward | backward |
# |:--|:--|:--|:--|
# | f, `CopyToRegion` | at the entry, before A | copy | all-reduce |
# | g, `ReduceFromRegion` | at the exit, after B | all-reduce | copy |
#
# A `torch.autograd.Function` has both directions. `backward` returns one gradient for each argument
# of `forward`: None for a group.

# %% [markdown]
# ### Exercise 7.1 · The conjugate pair
#
# *Difficulty 2 of 5 · 15 minutes · target: the sum over the group's ranks in one direction, a copy in
# the other, and no tensor of the caller written to*
#
# `dist.all_reduce` works in place, on a contiguous tensor. But the gradient that `backward` is given
# may be transposed, and another layer may read it, too: autograd hands one tensor to both sides of a
# residual connection. What `backward` needs, keep as an attribute of `ctx`.

# %%
# Exercise 7.1: f copies in forward and sums in backward; g sums in forward and copies in backward
class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        ctx.group = group
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
        ### END SOLUTION


# %%
class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ### BEGIN SOLUTION
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return gradient, None
        ### END SOLUTION


# %%
lab.check_regions(CopyToRegion, ReduceFromRegion)

# %% [markdown]
# ## Shards of linear layers
#
# The ranks of a group must divide a layer evenly. If they do not, a plain slice would overlap or
# leave rows out, and training would go on with wrong numbers. So whoever cuts a layer first asks for
# its part of the size:

# %%
def share(size, group, what):
    """size / t for the t ranks of the group; a ValueError where they do not divide it."""
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise ValueError(f"{what}: {ranks} ranks do not divide {size}; use a number that does")
    return size // ranks


labs.launch(lambda: share(36, dist.group.WORLD, "rows"), ranks=3, quiet=True)

# %% [markdown]
# ### Exercise 7.2 · Column- and row-parallel layers
#
# *Difficulty 3 of 5 · 20 minutes · target: outputs and gradients of the whole layers, 1/t of the
# weights in memory, one all-reduce in forward*
#
# `column_shard` returns an `nn.Linear` with this rank's rows of weight and bias. A
# `RowParallelLinear` has this rank's columns, takes this rank's part of the input, and returns the
# whole output: g is inside, f is not. A slice is a view, which keeps the whole weight in memory.
#
# <details><summary>Hint</summary>
#
# The sum over ranks would count a bias t times, so the bias comes after the sum. Every rank adds it
# and keeps it whole: then its gradient is the same on all ranks.
#
# `dist.get_rank(group)` is this rank's number in the group. Split along dimension 0 for the rows and
# along 1 for the columns, take your part, and copy it into memory of its own. Pass the layer's dtype
# and device on.
#
# </details>

# %%
# Exercise 7.2: this rank's part of a linear layer, cut by its outputs or by its inputs
def column_shard(linear, group):
    """An nn.Linear with this rank's out/t rows of the weight, and of the bias if there is one."""
    ### BEGIN SOLUTION
    rows, rank = share(linear.out_features, group, "column_shard"), dist.get_rank(group)
    weight, bias = linear.weight, linear.bias
    shard = nn.Linear(
        linear.in_features, rows, bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        shard.weight.copy_(weight.split(rows)[rank])
        if bias is not None:
            shard.bias.copy_(bias.split(rows)[rank])
    return shard
    ### END SOLUTION


# %%
class RowParallelLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        ### BEGIN SOLUTION
        columns = share(linear.in_features, group, "RowParallelLinear")
        mine = linear.weight.detach().split(columns, dim=1)[dist.get_rank(group)]
        self.weight = nn.Parameter(mine.clone())
        self.bias, self.group = linear.bias, group
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        total = ReduceFromRegion.apply(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias
        ### END SOLUTION


# %%
lab.check_linear_shards(column_shard, RowParallelLinear)

# %% [markdown]
# ## A whole Llama
#
# Attention divides by heads: each head has its own rows of the query, key and value layers, and its
# own columns of the output layer. Llama uses **grouped-query attention**: several query heads share
# a key and value head, so a rank needs both parts of a group. In the gated MLP, `gate_proj` and
# `up_proj` are column-parallel and `down_proj` is row-parallel. Embedding, norms and head stay whole
# on all ranks for now.

# %%
model = lab.llama(layers=1)
{name: list(parameter.shape) for name, parameter in model.model.layers[0].named_parameters()}

# %% [markdown]
# Hugging Face's attention reads the number of heads off the layers' outputs, so replacing the layers
# is enough. `lab.map_input(module, function)` applies a function to the hidden states that enter a
# module, before its forward:

# %%
layer = nn.Linear(2, 3)
lab.map_input(layer, lambda hidden: 2 * hidden)
x = torch.ones(1, 2)
torch.equal(layer(x), F.linear(2 * x, layer.weight, layer.bias))

# %% [markdown]
# How many all-reduces of b·s·h elements does a rank make in each layer and step, forward and backward
# together? (b sequences of s tokens, each a vector of h numbers.)

# %%
# A guess, for exercise 7.3
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("7.3", "all-reduces of b·s·h elements for a layer and step", my_guess)

# %% [markdown]
# ### Exercise 7.3 · Divide attention and the MLP
#
# *Difficulty 4 of 5 · 30 minutes · target: equal to the reference over 5 steps, 1/t of each layer's
# matrices on a rank, 4 all-reduces of b·s·h a layer and step*
#
# All ranks get the same batch. Heads, key and value heads, or an MLP that the ranks do not divide are
# refused: a ValueError whose sentence names the module (`self_attn` or `mlp`), both numbers, and what
# to do. `group=None` means all ranks.
#
# <details><summary>Hint</summary>
#
# Each module has one entry, which takes f, and one exit, which takes g. Query, key and value layers
# share their input: the gradients that they send back are added first, on each rank, and summed over
# the ranks once.
#
# Rows may divide where heads do not: 6 heads of 8 are 48 rows, and 4 ranks would cut a head in two.
# So ask `share` for the heads. Then, for each of `model.model.layers` and for attention and MLP:
# replace the layers with `setattr`, and apply f to the input. Make the optimizer at the end.
#
# </details>

# %%
# Exercise 7.3: a Llama with attention and MLPs divided among the ranks of a group
def tensor_parallel(model, optimizer_class, group=None, **settings):
    ### BEGIN SOLUTION
    group, config = group or dist.group.WORLD, model.config
    share(config.num_attention_heads, group, "self_attn's query heads")
    share(config.num_key_value_heads, group, "self_attn's key and value heads")
    share(config.intermediate_size, group, "the inner size of mlp")
    for layer in model.model.layers:
        parts = {layer.self_attn: ("q_proj", "k_proj", "v_proj", "o_proj"),
                 layer.mlp: ("gate_proj", "up_proj", "down_proj")}
        for module, (*columns, row) in parts.items():
            for name in columns:
                setattr(module, name, column_shard(getattr(module, name), group))
            setattr(module, row, RowParallelLinear(getattr(module, row), group))
            lab.map_input(module, lambda hidden: CopyToRegion.apply(hidden, group))
    return model, optimizer_class(model.parameters(), **settings)
    ### END SOLUTION


# %%
lab.check_tensor_parallel(tensor_parallel)

# %%
lab.show_shards(tensor_parallel, ranks=4)

# %% [markdown]
# **Notice:** column-parallel layers are cut by rows of `weight`, row-parallel ones by columns. Each
# rank has whole heads: 2 of 8 query heads, 32 rows, and the key and value head that they share. What a
# layer keeps whole, the weights of its RMSNorm layers, is tiny. But every rank still has all of the
# embedding and of the head.

# %% [markdown]
# ## Count the all-reduces
#
# It would also be right to apply f at the entry of *each* column-parallel layer. The numbers are the
# same, because a sum of sums is the sum. The lab builds that variant from your own parts and counts
# the all-reduces of both, on 2 ranks:

# %%
lab.show_all_reduces(tensor_parallel, CopyToRegion, column_shard, RowParallelLinear)

# %% [markdown]
# **Notice:** both train alike, and f at each layer sends 7 all-reduces in place of 4: in backward
# one for each of three layers of attention and one for each of two layers of the MLP. Unlike DDP's,
# these all-reduces cannot wait: the next product needs their result. So tensor parallelism stays
# inside a node, where links are fast.

# %% [markdown]
# Now the memory. How many times smaller is what one of 4 ranks keeps, compared with one rank alone:
# parameters, gradients and optimizer state of this small Llama together?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("7.3b", "times smaller on one of 4 ranks, with AdamW in fp32", my_guess)

# %%
lab.show_resident_bytes(tensor_parallel)

# %% [markdown]
# **Notice:** attention and MLP shrink as 1/t. Embedding, head and norms do not shrink at all, and
# keep the bars above the prediction for a model of which all is divided. In Llama-3-8B, as here,
# they are 13 % of all parameters; on 8 ranks they would be more than half of what a rank keeps. So
# the next part divides them, too.

# %% [markdown]
# ## The vocabulary, divided
#
# Exercise 7.3 divides the layers; embedding and head are still whole on every rank. Llama-3-8B has
# v = 128,256 words in its vocabulary. The head gives each token v logits, and the loss needs 12 bytes
# for each at its peak: the log-softmax and two gradients, in fp32. What is that for b·s = 8,192
# tokens?

# %%
words, hidden, tokens = 128_256, 4096, 8192
{"GB of embedding and head, bf16": 2 * 2 * words * hidden / 1e9,
 "GB of the loss at its peak": 12 * tokens * words / 1e9,
 "GB of hidden states between two layers, bf16": 2 * tokens * hidden / 1e9}

# %% [markdown]
# The loss needs most, and t ranks would all compute the same one. So rank r of t gets the r-th of t
# equal parts of the embedding's rows, and the same rows of the head: **vocabulary parallelism**.
#
# Ranks that do not divide v are refused. Training programs add rows to the vocabulary until it is
# divisible: no token ever looks them up, but their logits must be −∞ in the loss. Llama-3's 128,256
# is 501 · 256.

# %%
def rows_of_rank(count, group):
    """The range of this rank's rows, of `count`."""
    rows, left = divmod(count, dist.get_world_size(group))
    if left:
        raise ValueError(f"{dist.get_world_size(group)} ranks do not divide {count} rows: pad them")
    first = rows * dist.get_rank(group)
    return range(first, first + rows)


labs.launch(lambda: rows_of_rank(128_256, dist.group.WORLD), ranks=2, quiet=True)

# %% [markdown]
# ### Exercise 7.4 · Look up rows that another rank has
#
# *Difficulty 3 of 5 · 15 minutes · target: 1/t of the rows, in memory of their own; one all-reduce of
# b·s·h in forward, none in backward*
#
# All ranks look up all tokens. For another rank's row a rank returns zeros, so the sum over the ranks
# has every row once.
#
# `embedding.padding_idx` is None, or a row that gets no gradient. `F.embedding` takes it, too, counted
# in the rows that it is given.

# %%
# Exercise 7.4: look up rows that another rank has
class VocabularyParallelEmbedding(nn.Module):
    def __init__(self, embedding, group):
        super().__init__()
        ### BEGIN SOLUTION
        mine = rows_of_rank(embedding.num_embeddings, group)
        self.group, self.first = group, mine.start
        padding = embedding.padding_idx
        self.padding_idx = mine.index(padding) if padding in mine else None
        self.weight = nn.Parameter(embedding.weight.detach()[mine.start : mine.stop].clone())
        ### END SOLUTION

    def forward(self, tokens):  # of any shape
        ### BEGIN SOLUTION
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        return ReduceFromRegion.apply(found.masked_fill(elsewhere[..., None], 0), self.group)
        ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# A lookup fails at a row that is not there. So look up some row that is, and forget what you found.
#
# In `__init__`: this rank's rows, cloned, as the parameter `self.weight`. The padding row is on one
# rank only; where is it there, and what is it on the others?
#
# In `forward`: the tokens as this rank counts them; a mask of those that it does not have; a lookup
# with some valid number at these; zeros in their place; the sum over the group whose backward is the
# identity, because the gradient of the sum is the same on every rank.
#
# </details>

# %%
lab.check_vocabulary_embedding(VocabularyParallelEmbedding)

# %% [markdown]
# **Notice:** each rank's rows get their gradients from backward alone: whole, and of its own rows.
# Nothing is reduced, because every rank has the gradient of the output.

# %% [markdown]
# ## A loss of logits that nobody has
#
# The head is column-parallel: f before it, v/t logits of each token after it. To gather them would
# undo everything. But the loss of a token with target y needs little of them:
#
# $$-\log\frac{e^{x_y}}{\sum_j e^{x_j}} = \log\sum_j e^{x_j - m} - (x_y - m)\qquad m = \max_j x_j$$
#
# How many numbers of each token must the ranks reduce, instead of v?

# %%
# A guess, for exercise 7.5
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("7.5", "numbers that the loss all-reduces for each token", my_guess)

# %% [markdown]
# Two things make an all-reduce inside autograd delicate:
#
# - `dist.all_reduce` works in place and is invisible to autograd. If an operation has saved that
#   tensor for backward, as `exp` saves its result, the gradient is silently wrong.
# - torch's differentiable all-reduce sums gradients in backward, too: right where each rank has a loss
#   of its own. Here all ranks compute *the same* loss, and the gradient would be t times too large.
#
# `ReduceFromRegion` of exercise 7.1 does neither.

# %% [markdown]
# ### Exercise 7.5 · Cross-entropy of divided logits
#
# *Difficulty 4 of 5 · 30 minutes · target: three numbers of each token travel; logits of ±10,000 and
# bf16 do no harm*
#
# Rank r has the logits of the r-th part of the vocabulary, of shape (…, v/t); `targets` has the
# tokens' shape. A target of −100 is none: its token counts neither in the sum nor in the mean.
# Compute in fp32. The maximum cancels in the formula, so it needs no gradient.

# %%
# Exercise 7.5: cross-entropy of divided logits
def vocabulary_parallel_cross_entropy(logits, targets, group):
    """The mean over the targets that are not -100."""
    ### BEGIN SOLUTION
    logits, rows = logits.float(), logits.shape[-1]
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    logits = logits - largest
    total = ReduceFromRegion.apply(logits.exp().sum(-1), group)
    local = targets - rows * dist.get_rank(group)
    elsewhere = (local < 0) | (local >= rows)
    mine = logits.gather(-1, local.masked_fill(elsewhere, 0)[..., None]).squeeze(-1)
    target = ReduceFromRegion.apply(mine.masked_fill(elsewhere, 0), group)
    counted = targets != -100
    return (total.log() - target)[counted].sum() / counted.sum()
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each of the three numbers has a rank's own part, which it can compute alone: the largest of its
# logits, its sum of exponentials, and the target's logit, if it has that one.
#
# The largest of all ranks is reduced with `dist.ReduceOp.MAX`, of detached logits. Subtract it from
# the logits. Sum their exponentials over the rank's part, then over the ranks. For the target's
# logit use the trick of exercise 7.4: `logits.gather(-1, ...)` with some valid number, zeros where
# another rank has the row, and the sum. −100 is no row of any rank. At the end the mean, over the
# targets that are not −100.
#
# </details>

# %% [markdown]
# Now embedding, head and loss of a Llama. `lab.set_loss(model, function)` makes `function(logits,
# targets)` its loss; targets are the labels, shifted by one.
#
# With **tied** weights embedding and head are one parameter, and so are their shards: rank r has the
# same rows of both. The rank's backward adds up both gradients, and the sum is complete. An
# all-reduce would add other ranks' rows to it.
#
# `model.get_input_embeddings()`, `get_output_embeddings()` and `set_...` are Hugging Face's.

# %%
# Exercise 7.5: embedding, head and loss of a Llama
def vocabulary_parallel(model, group):
    """Replaces them in place; a tied weight stays one parameter."""
    ### BEGIN SOLUTION
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows, columns = VocabularyParallelEmbedding(embedding, group), column_shard(head, group)
    if head.weight is embedding.weight:
        columns.weight = rows.weight
    lab.map_input(columns, lambda hidden: CopyToRegion.apply(hidden, group))
    model.set_input_embeddings(rows)
    model.set_output_embeddings(columns)
    lab.set_loss(model, lambda logits, targets: vocabulary_parallel_cross_entropy(
        logits, targets, group))
    ### END SOLUTION

# %%
lab.check_vocabulary_parallel(vocabulary_parallel_cross_entropy, vocabulary_parallel)

# %%
lab.show_loss_cost(vocabulary_parallel_cross_entropy)

# %% [markdown]
# **Notice:** on 4 ranks the peak is a quarter, and what a rank sends no longer depends on the
# vocabulary. The bytes are those of a GPU node; on a CPU they say nothing about time.

# %% [markdown]
# ## The norm of gradients that are not all here
#
# Clipping scales all gradients by max_norm / norm if the norm is larger than max_norm. The norm is the
# root of the sum of *all* squares. A rank has the squares of its own shards; but what is replicated,
# such as the weights of Llama's RMSNorm layers, has the same gradient on every rank. Here is what
# `torch.nn.utils.clip_grad_norm_` finds on each of two ranks:

# %%
def norm_of_one_rank():
    torch.manual_seed(dist.get_rank())
    shard = nn.Parameter(torch.zeros(8))  # each rank's own part of a parameter with 16 numbers
    shard.grad = torch.randn(8)
    return nn.utils.clip_grad_norm_([shard], 1.0).item()


labs.launch(norm_of_one_rank, ranks=2, quiet=True)

# %% [markdown]
# Two norms for one gradient: each rank would scale by another factor, and the shards of one weight
# would move by different amounts.

# %% [markdown]
# ### Exercise 7.6 · Clip by one norm
#
# *Difficulty 2 of 5 · 15 minutes · target: every square counted once; one number travels*
#
# `sharded` and `replicated` are lists of parameters. Either may be empty, and a parameter may have no
# gradient. Scale gradients in place, as little as needed, and return the norm from before.

# %%
# Exercise 7.6: clip by one norm
def clip_grad_norm(sharded, replicated, max_norm, group):
    ### BEGIN SOLUTION
    def squares(parameters):
        found = [p.grad.square().sum() for p in parameters if p.grad is not None]
        return sum(found, torch.zeros((), device=labs.device()))

    total = squares(sharded)
    dist.all_reduce(total, group=group)
    norm = (total + squares(replicated)).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for parameter in [*sharded, *replicated]:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm
    ### END SOLUTION

# %% [markdown]
# The check also trains a Llama with it, of which now every matrix is divided: the layers by your
# `tensor_parallel`, embedding, head and loss by your `vocabulary_parallel`.

# %%
def whole_llama(model, optimizer_class, **settings):
    vocabulary_parallel(model, dist.group.WORLD)
    return tensor_parallel(model, optimizer_class, **settings)

# %%
lab.check_clip_grad_norm(clip_grad_norm, whole_llama)

# %%
lab.show_norms(clip_grad_norm, vocabulary_parallel, whole_llama)

# %% [markdown]
# **Notice:** on the right, replicated parameters counted four times change nothing that can be
# seen, because only the small weights of RMSNorm are replicated. On the left all layers are, and the
# same mistake shows at once. So a wrong norm can pass every test with one layout and spoil training with
# another: a clipped step is then too small by the same factor.

# %% [markdown]
# ## Cut the sequence between the layers
#
# Tensor parallelism cuts attention and MLP. But every rank keeps for backward what both norms of a layer
# read, their normalized inputs and their outputs: 6·b·s·h numbers (batch b, sequence s, hidden size h).
# Attention keeps queries, keys, values and its output, an MLP four tensors of its inner size. For
# Llama-3-8B and one sequence of 8,192 tokens in bf16, on one rank and on t = 8, in GB:

# %%
tokens, hidden, inner, layers = 8192, 4096, 14_336, 32
unit = 2 * tokens * hidden * layers / 1e9  # GB of b·s·h numbers in every layer
divided = (1 + 2 * 8 / 32 + 1) + 4 * inner / hidden  # 8 key and value heads for 32 query heads
print(lab.layer_activations("Llama-3-8B"))  # the same, in numbers of b·s·h, with all small terms
{t: {"norms": round(6 * unit, 1), "attention and MLP": round(divided * unit / t, 1)}
 for t in (1, 8)}

# %% [markdown]
# **Notice:** on 8 ranks, what the norms keep on every rank is almost three times as large as a rank's
# part of the rest.
#
# A norm and a residual addition treat each token by itself. So between attention and MLP, a rank can
# work on s/t tokens: **sequence parallelism**. Attention and the MLP need all tokens: at their entry
# comes an all-gather along the sequence, at their exit a reduce-scatter in place of the all-reduce.

# %% [markdown]
# | function | forward | backward |
# |:--|:--|:--|
# | f, `CopyToRegion` | nothing | all-reduce |
# | g, `ReduceFromRegion` | all-reduce | nothing |
# | `GatherToRegion` | all-gather | reduce-scatter |
# | `ReduceScatterFromRegion` | reduce-scatter | all-gather |
#
# Guess: how many bytes does a rank send for a layer, as a multiple of what it sends with f and g?

# %%
# A guess, for exercise 7.7
### BEGIN SOLUTION
my_guess = 1
### END SOLUTION
labs.guess("7.7", "bytes per layer, in those of tensor parallelism", my_guess)

# %% [markdown]
# The lab has both collectives, along dimension 1 of (b, s, h) tensors and without gradients:
#
# | call | returns |
# |:--|:--|
# | `lab.all_gather_sequence(x, group)` | all ranks' pieces x, joined in the order of the ranks |
# | `lab.reduce_scatter_sequence(x, group)` | this rank's piece of the sum of all ranks' x |
#
# Two ranks, two tokens each:

# %%
def both_collectives():
    piece = torch.full((1, 2, 1), dist.get_rank() + 1.0, device=labs.device())
    whole = lab.all_gather_sequence(piece, dist.group.WORLD)
    summed = lab.reduce_scatter_sequence(whole, dist.group.WORLD)
    return whole.flatten().tolist(), summed.flatten().tolist()


labs.launch(both_collectives, ranks=2, quiet=True)

# %% [markdown]
# ### Exercise 7.7 · A Llama whose norms see s/t tokens
#
# *Difficulty 4 of 5 · 30 minutes · target: 4 all-gathers and 4 reduce-scatters of b·s·h a layer and
# step, and the losses of the reference*
#
# First the pair of functions. A gradient comes back as one tensor for each input of `forward`; the
# group has none.

# %%
# Exercise 7.7: all tokens at the entry of attention and of the MLP
class GatherToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # (b, s/t, h) -> (b, s, h)
        ### BEGIN SOLUTION
        ctx.group = group
        return lab.all_gather_sequence(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return lab.reduce_scatter_sequence(gradient, ctx.group), None
        ### END SOLUTION

# %%
# Exercise 7.7: the sum over the ranks at their exit, of which each keeps its tokens
class ReduceScatterFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # (b, s, h) -> (b, s/t, h)
        ### BEGIN SOLUTION
        ctx.group = group
        return lab.reduce_scatter_sequence(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return lab.all_gather_sequence(gradient, ctx.group), None
        ### END SOLUTION

# %% [markdown]
# A row-parallel layer now ends in `ReduceScatterFromRegion`. Its bias, if it has one, is added to the
# piece that is left.

# %%
# Exercise 7.7: a row-parallel layer whose output is this rank's tokens
class RowParallelToPiece(RowParallelLinear):
    def forward(self, x):  # (b, s, in/t) -> (b, s/t, out)
        ### BEGIN SOLUTION
        piece = ReduceScatterFromRegion.apply(F.linear(x, self.weight), self.group)
        return piece if self.bias is None else piece + self.bias
        ### END SOLUTION

# %% [markdown]
# Norms, and such biases, are on all ranks. But now each rank has gradients of its *own tokens* only, and
# no error says so: they are a part of a sum. `parameter.register_hook(function)` makes autograd put
# `function(gradient)` in place of what each backward pass would add to the gradient.

# %%
# Exercise 7.7: what only sees s/t tokens gets the sum of its gradients over the group
def sum_gradients(model, group):
    ### BEGIN SOLUTION
    for name, parameter in model.named_parameters():
        is_partial = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        if is_partial and parameter.requires_grad:
            parameter.register_hook(lambda part: ReduceFromRegion.apply(part, group))
    ### END SOLUTION

# %% [markdown]
# The embedding makes all tokens on every rank, and after the last norm, the head reads all tokens on
# every rank. So the hidden states are split before the first layer and joined after the last norm:
#
# | call | forward | backward |
# |:--|:--|:--|
# | `lab.split_sequence(x, group)` | this rank's tokens | all-gather |
# | `lab.join_sequence(x, group)` | all-gather | this rank's tokens |
#
# `lab.map_output(module, function)` does at a module's exit what `lab.map_input` does at its entry.
# Masks and rotary angles stay those of all tokens: attention has them all.

# %%
# Exercise 7.7: as tensor_parallel, with pieces of the sequence between attention and MLP
def sequence_parallel(model, optimizer_class, group=None, **settings):
    ### BEGIN SOLUTION
    group = group or dist.group.WORLD
    for layer in model.model.layers:
        for module, names in ((layer.self_attn, "q k v o"), (layer.mlp, "gate up down")):
            *columns, row = [f"{name}_proj" for name in names.split()]
            for name in columns:
                setattr(module, name, column_shard(getattr(module, name), group))
            setattr(module, row, RowParallelToPiece(getattr(module, row), group))
            lab.map_input(module, lambda piece: GatherToRegion.apply(piece, group))
    lab.map_input(model.model.layers[0], lambda hidden: lab.split_sequence(hidden, group))
    lab.map_output(model.model.norm, lambda piece: lab.join_sequence(piece, group))
    sum_gradients(model, group=group)
    return model, optimizer_class(model.parameters(), **settings)
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# `backward` of one function is `forward` of the other. Why is `lab.join_sequence` not `GatherToRegion`?
# After the last norm every rank computes the same, so each gets the whole gradient. A sum over the ranks
# would count it t times.
#
# `sum_gradients`: go through `model.named_parameters()`, take the norms by their names, and the biases of
# `o_proj` and `down_proj`. `ReduceFromRegion.apply(x, group)` is a sum over the group that leaves x alone.
#
# `sequence_parallel`: copy your `tensor_parallel`. Two names change, two lines split and join, one call
# sums.
#
# </details>

# %%
lab.check_sequence_parallel(GatherToRegion, ReduceScatterFromRegion, sequence_parallel)

# %%
lab.show_activations(tensor_parallel, sequence_parallel)

# %% [markdown]
# **Notice:** tensor parallelism divides only what is inside attention and MLP. Sequence parallelism
# divides also what the norms keep. What is left undivided is the gathered input of attention and MLP,
# which the first matrices read in backward. Megatron-LM keeps only a piece of that as well and gathers
# it once more in backward: then all is divided by t, for one more all-gather in each region.

# %%
lab.show_layer_collectives(tensor_parallel, sequence_parallel)

# %% [markdown]
# **Notice:** one all-gather and one reduce-scatter take the place of each all-reduce. Each of the two
# sends half of an all-reduce's bytes, so a layer sends the same, and keeps less. New are the all-reduces
# of the norms' gradients, of h numbers each.

# %% [markdown]
# ## Dropout on several ranks
#
# Dropout draws random numbers, and ranks can draw alike or differently. Four ranks have two of 8 heads
# each. With one seed on all of them, how many different masks do the 8 heads get?

# %%
def masks_of_heads():
    torch.manual_seed(0)  # the same seed on every rank
    return F.dropout(torch.ones(2, 16, 16), 0.1)


torch.cat(labs.launch(masks_of_heads, ranks=4, quiet=True)).unique(dim=0).shape[0]

# %% [markdown]
# Two: each rank's heads have the masks of rank 0's. The opposite mistake is as silent. Outside attention
# and MLP, tensor parallelism without a cut sequence relies on *equal* hidden states; with different
# masks they differ from there on. So a rank needs two **random streams**:
#
# | dropout of | draws |
# |:--|:--|
# | hidden states that all ranks have (tensor parallelism, outside the regions) | alike on all ranks |
# | a shard: this rank's heads, its piece of the sequence | differently on each |

# %% [markdown]
# ### Exercise 7.8 · Two streams of random numbers
#
# *Difficulty 3 of 5 · 15 minutes · target: equal masks where ranks must agree, and no mask twice
# anywhere else*
#
# A `torch.Generator().manual_seed(n)` draws by itself: `torch.rand(shape, generator=...)`, on the CPU.
# Each of 2,048 data-parallel replicas makes this object for its own group, with seed 0, 1, 2 and so
# on, and none may have a stream of another one. The default generator is not used, because other
# code draws from it too.

# %%
# Exercise 7.8: one stream that the group shares, one of this rank's own
class DropoutStreams:
    def __init__(self, seed, group):
        ### BEGIN SOLUTION
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        first = seed * (ranks + 1)
        self.shared = torch.Generator().manual_seed(first)
        self.own = torch.Generator().manual_seed(first + 1 + rank)
        ### END SOLUTION

    def dropout(self, x, p, is_shard):  # zeros with probability p; the rest divided by 1 - p
        ### BEGIN SOLUTION
        generator = self.own if is_shard else self.shared
        keep = torch.rand(x.shape, generator=generator).to(x.device) >= p
        return x * keep / (1 - p)
        ### END SOLUTION

# %% [markdown]
# A job that stops and goes on needs the streams where they were. `generator.get_state()` returns a
# tensor, `generator.set_state(tensor)` takes it.

# %%
# Exercise 7.8: what a checkpoint saves of them, on each rank
class ResumableStreams(DropoutStreams):
    def state_dict(self):
        ### BEGIN SOLUTION
        return {"shared": self.shared.get_state(), "own": self.own.get_state()}
        ### END SOLUTION

    def load_state_dict(self, state):
        ### BEGIN SOLUTION
        self.shared.set_state(state["shared"])
        self.own.set_state(state["own"])
        ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# What must the seed of a stream depend on? The shared one: on `seed`, but not on the rank. The own one:
# on both, and it must not be the shared one of any rank.
#
# List the seeds of two replicas with 2 ranks each on paper: with seed + 1 + rank, which number stands
# there twice? Leave room between the replicas: multiply `seed` by something that depends on the number
# of ranks. Seed a generator once, in `__init__`: a generator that is seeded in each call draws the same
# mask in each step.
#
# </details>

# %%
lab.check_dropout_streams(ResumableStreams)

# %%
lab.show_masks(ResumableStreams)

# %% [markdown]
# **Notice:** in the first three columns all rows are equal, in the last three no two are. Under
# sequence parallelism the dropout between the regions moves to the right half: its input is a piece of
# the sequence there, and its mask takes 1/t of the memory. A checkpoint must hold the own stream of *each* rank.

# %% [markdown]
# ## What torch does for you
#
# `parallelize_module(model, mesh, plan)` cuts a model in place. The plan has a **parallel style** for
# each module by its name, where `*` stands for all layers:
#
# | style | does |
# |:--|:--|
# | `ColwiseParallel()` | column-parallel: all of the input, a part of the output |
# | `RowwiseParallel(output_layouts=Shard(1))` | row-parallel; `Shard(1)`: reduce-scatter along dimension 1 |
# | `SequenceParallel()` | a norm on a piece of the sequence |
# | `PrepareModuleInput(...)` | changes the layout of a module's inputs at its entry |

# %% [markdown]
# A **layout** says where a tensor's numbers are: `Replicate()`, all on every rank; `Shard(1)`, cut
# along dimension 1; `Partial("sum")`, each rank has a part of the sum. A parameter that was cut is a
# `DTensor`, and knows its layout. What is outside the layers is given, with the vocabulary cut, too:

# %%
OUTSIDE = {
    "model.embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "model.layers.0": tp.PrepareModuleInput(  # what split_sequence does
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    "model.norm": tp.SequenceParallel(),
    "lm_head": tp.ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}

# %% [markdown]
# ### Exercise 7.9 · A plan for a layer of Llama
#
# *Difficulty 3 of 5 · 20 minutes · target: the reference's losses on 2 and 4 ranks, with the
# collectives of your own sequence parallelism*
#
# A layer calls `self_attn(hidden_states=..., ...)` and `mlp(x)`. Argument names of
# `PrepareModuleInput` are `input_layouts` and `desired_input_layouts` for positional inputs,
# `input_kwarg_layouts` and `desired_input_kwarg_layouts`, dictionaries by name, for the others.

# %%
# Exercise 7.9: name of a module in a layer -> parallel style
def layer_plan():
    ### BEGIN SOLUTION
    piece, whole = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    return {
        "input_layernorm": tp.SequenceParallel(),
        "self_attn": tp.PrepareModuleInput(
            input_kwarg_layouts=piece, desired_input_kwarg_layouts=whole),
        "self_attn.[qkv]_proj": tp.ColwiseParallel(),
        "self_attn.o_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": tp.SequenceParallel(),
        "mlp": tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate_proj": tp.ColwiseParallel(), "mlp.up_proj": tp.ColwiseParallel(),
        "mlp.down_proj": tp.RowwiseParallel(output_layouts=Shard(1))}
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Nine modules of a layer need a style: two norms, seven matrices; and two more, attention and MLP,
# need all tokens at their entry. `lab.llama(layers=1).model.layers[0]` prints their names.
#
# Go through your `sequence_parallel`: which line is which style? `GatherToRegion` at an entry is a
# `PrepareModuleInput` from `Shard(1)` to `Replicate()`. `RowParallelToPiece` is a `RowwiseParallel`
# with an output layout. `sum_gradients` has no counterpart: what does a DTensor know that makes it
# unnecessary?
#
# </details>

# %%
def torchs_parallel(model, optimizer_class, **settings):
    mesh = init_device_mesh(labs.device().type, (dist.get_world_size(),))
    layers = {f"model.layers.*.{name}": style for name, style in layer_plan().items()}
    model = tp.parallelize_module(model, mesh, {**OUTSIDE, **layers})
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer


lab.check_torchs_parallel(torchs_parallel)

# %% [markdown]
# The check trains inside `with loss_parallel():`, which computes the cross-entropy on logits that stay
# cut. `CommDebugMode` of torch counts the collectives of a DTensor program; the lab counts what reaches
# the process group, by whatever API. Both for one step, forward and backward:

# %%
lab.show_comm_debug(torchs_parallel)

# %%
lab.show_collectives_of_plan(tensor_parallel, sequence_parallel, torchs_parallel)

# %% [markdown]
# **Notice:** torch's plan sends what your sequence parallelism sends, call for call. Only the small all-reduces for the norms' gradients
# come at another moment: yours in backward, torch's when the optimizer reads the gradient.

# %% [markdown]
# ## A gradient that is only a part
#
# With DTensors, too, somebody must add up the parts of a norm's gradient. Two ranks, two tokens each:

# %%
def gradient_of_a_norm():
    mesh = init_device_mesh(labs.device().type, (2,))
    norm = tp.parallelize_module(nn.RMSNorm(2, device=labs.device()), mesh, tp.SequenceParallel())
    x = torch.arange(1.0, 9.0, device=labs.device()).view(1, 4, 2)  # 4 tokens
    norm(x.chunk(2, dim=1)[dist.get_rank()]).sum().backward()
    gradient = norm.weight.grad
    return {"layout": repr(gradient.placements[0]), "to_local()": gradient.to_local().tolist(),
            "full_tensor()": gradient.full_tensor().tolist()}


labs.launch(gradient_of_a_norm, ranks=2, quiet=True)

# %% [markdown]
# **Notice:** `to_local()` gives each rank its own part, another one on each, without an error.
# `full_tensor()` reduces. Whoever writes an optimizer, clips gradients or logs a norm of gradients must
# ask for the second one, or the copies of the norms drift apart.

# %% [markdown]
# ## A sequence longer than one rank can hold
#
# Llama 3 was trained on sequences of 131,072 tokens. How much does a layer of it keep for backward? In
# "Cut the sequence" you counted 6 + 16.5 numbers of b·s·h for Llama-3-8B; in 16 bits that is 45·s·b·h
# bytes. (Notebook 01's 34·s·b·h is another model's: a GPT with dropout and an MLP of 4·h.) A kernel that
# keeps the scores needs 2·a·b·s² bytes for a heads in addition:

# %%
s, h, layers, heads = 131_072, 4096, 32, 32
kept = 2 * lab.layer_activations("Llama-3-8B").total * s * h  # bytes of one layer
nbytes = {"all activations": layers * kept, "scores of one layer": 2 * heads * s**2,
          "activations on each of 16 ranks": layers * kept / 16}
{name: f"{size / 1e9:,.1f} GB" for name, size in nbytes.items()}

# %% [markdown]
# No GPU has memory for 773 GB. Tensor parallelism divides them only by the GPUs that NVLink joins: 8 in a
# host of H100s, 72 in a rack of *[GB200 NVL72](https://www.nvidia.com/en-us/data-center/gb200-nvl72/)*. In
# **context parallelism** each rank has s/N tokens of the sequence in *every* layer: norms, linear layers
# and the MLP need no other token. Attention does: a query needs the keys and values of all tokens before
# its own. Llama 3 divided each such sequence among *[16 ranks](https://arxiv.org/abs/2407.21783)*.

# %% [markdown]
# ## Two parts of one softmax
#
# A rank meets the keys block after block, so the softmax must be computed in parts: an **online
# softmax**. For a block, `lab.block_attention(q, k, v, visible)` returns `out`, the attention to these
# keys alone, and `lse`, the logarithm of the sum of their exponentials. `visible` says which query
# sees which key.

# %%
q, k, v = (torch.randn(1, 2, tokens, 4) for tokens in (3, 5, 5))  # batch, heads, tokens, d
visible = torch.arange(3)[:, None] >= torch.arange(5)  # query 0 sees key 0, query 1 two keys, ...
out, lse = lab.block_attention(q, k, v, visible)
out.shape, lse.shape, lab.block_attention(q, k, v, torch.zeros_like(visible))[1][0, 0]

# %% [markdown]
# A query that sees no key of a block has lse = -inf and out = 0 there. In float32, exp of anything
# above 88 is infinite, and scores of real models get that large.
#
# ### Exercise 7.10 · Merge two partial attentions
#
# *Difficulty 3 of 5 · 12 minutes · target: the attention to the keys of both parts, with any scores,
# and no NaN where a query sees nothing*

# %%
# Exercise 7.10: two partial attentions of the same queries become one
def merge(out_a, lse_a, out_b, lse_b):
    """(out, lse) of the attention to the keys of a and of b; out (..., d), lse without the d."""
    ### BEGIN SOLUTION
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weight_a, weight_b = ((part - finite).exp()[..., None] for part in (lse_a, lse_b))
    return weight_a * out_a + weight_b * out_b, lse
    ### END SOLUTION


# %%
lab.check_merge(merge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Undo each part's division by its own sum of exponentials, add, and divide by the sum of both.
#
# The sum of both is exp(lse_a) + exp(lse_b); its logarithm is the new lse, and torch has a function
# that adds in this way without overflow. The weight of a part is exp(its lse - the new lse), never
# more than 1. Where both are -inf, the difference is NaN: subtract 0 there.
#
# </details>

# %% [markdown]
# **Notice:** the weights of both parts add up to 1, and only differences of lse went through exp.
# FlashAttention computes each block of scores in this way inside one GPU; a ring does it over ranks.

# %% [markdown]
# Three ways bring all keys to all queries: gather them, exchange tokens for heads, or pass them round a
# ring. You build the ring, the hardest, and then run the other two beside it.

# %% [markdown]
# ## Keys and values go round
#
# In **ring attention** K and V are sent, and the queries stay. Each rank passes what it has to the next
# rank. All sends and receives go out in *one batch*. With `isend` and `irecv` issued one after the
# other, NCCL deadlocks: each rank's send waits until the next rank receives, and none receives. gloo
# buffers, so on a CPU the mistake does not show.

# %%
def pass_on(tensors, group):
    """Sends contiguous tensors to the next rank of the group; returns the previous rank's."""
    rank, ranks = group.rank(), group.size()
    arriving, batch = [torch.empty_like(tensor) for tensor in tensors], []
    for sent, received in zip(tensors, arriving):
        batch.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks))
        batch.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks))
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return arriving


lab.show_ring(pass_on)

# %% [markdown]
# **Notice:** after N-1 passes every rank has met every piece, and has held one at a time. One pass
# more would bring each piece home.

# %% [markdown]
# A rank has q, k and v of its own tokens, and `positions`: where in the sequence each of them stands.
# The tokens of a rank need not follow one another, so only positions say who sees whom. Where nothing
# is gathered, a head's scores have (s/N)² numbers, and K and V s/N tokens. Guess: how many times as much
# memory does a rank of 2 need at its peak as a rank of 8?

# %%
# A guess, for exercise 7.11
### BEGIN SOLUTION
my_guess = 16
### END SOLUTION
labs.guess("7.11", "peak of a rank of 2, as a multiple of that of a rank of 8", my_guess)

# %% [markdown]
# ### Exercise 7.11 · Ring attention
#
# *Difficulty 5 of 5 · 45 minutes · target: full attention and its gradients, N-1 passes forward and N
# backward, and a peak that does not grow with N*
#
# Forward first. k, v and `positions` are sent together. k and v may have fewer heads than q, as in
# Llama; `lab.block_attention` knows that, and divides the scores by √d.

# %%
# Exercise 7.11: attention of this rank's queries to all keys; each rank has a piece of the sequence
def ring_forward(q, k, v, positions, group):
    """(out, lse) of q, (batch, heads, s/N, d); `positions` (s/N) are those of q, and of k and v."""
    ### BEGIN SOLUTION
    ring = [tensor.contiguous() for tensor in (k, v, positions)]
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for passed in range(dist.get_world_size(group)):
        if passed:
            ring = pass_on(ring, group)
        keys, values, places = ring
        visible = positions[:, None] >= places
        out, lse = merge(out, lse, *lab.block_attention(q, keys, values, visible))
    return out, lse
    ### END SOLUTION

# %% [markdown]
# Backward: `lab.block_backward(q, k, v, visible, out, lse, grad)` returns what one block contributes
# to dq, dk and dv, in the shapes of q, k and v; out and lse are those that forward returned, of *all*
# keys. A key's gradient is a sum over the queries of all ranks, so dk and dv are sent with the k and v that
# they belong to, until they are home.

# %%
def ring_backward(q, k, v, positions, out, lse, grad, group):
    """(dq, dk, dv) of this rank's q, k and v; grad is the gradient of out."""
    ### BEGIN SOLUTION
    ring = [tensor.contiguous() for tensor in (k, v, positions)]
    ring += [torch.zeros_like(ring[0]), torch.zeros_like(ring[1])]
    dq = torch.zeros_like(q)
    for _ in range(dist.get_world_size(group)):
        keys, values, places, dk, dv = ring
        visible = positions[:, None] >= places
        parts = lab.block_backward(q, keys, values, visible, out, lse, grad)
        for total, part in zip((dq, dk, dv), parts):
            total += part
        ring = pass_on(ring, group)
    return dq, ring[3], ring[4]
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Draw the picture above for two ranks, and write beside each box what is computed there.
#
# Forward: begin with out = 0 and lse = -inf, which is the attention to no key. N times: which of my
# queries see which of these keys? The block's attention; merge. Between two blocks, one pass. Sends
# take contiguous memory.
#
# Backward: the same rounds, with two more tensors in the ring, which begin as zeros. In each round add
# the block's contributions to dq, which stays, and to the dk and dv that are here. N passes.
#
# </details>

# %%
class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, positions, group):
        out, lse = ring_forward(q, k, v, positions, group)
        ctx.save_for_backward(q, k, v, positions, out, lse)
        ctx.ring = group
        return out

    @staticmethod
    def backward(ctx, grad):
        return *ring_backward(*ctx.saved_tensors, grad, ctx.ring), None, None

# %%
def ring_attention(q, k, v, positions, group):
    return RingAttention.apply(q, k, v, positions, group)


lab.check_ring_attention(ring_attention)

# %% [markdown]
# The check also counts what a rank sends, and records its peak. This exercise is the ring, so an answer that
# gathers K and V first is rejected, although it gives the same numbers. Llama 3 does gather them: see the
# next section. Here is your ring's peak on 2, 4 and 8 ranks, with all scores of a block in memory, and with
# `lab.block_attention` computing tiles of 64 queries and keys, as a fused kernel does:

# %%
lab.show_ring_memory(ring_attention)

# %% [markdown]
# **Notice:** the scores of a block fall with 1/N² and the rest with 1/N, so the peak falls faster than
# 1/N. In tiles no block's scores are ever complete. What remains are pieces of K, V and their gradients,
# and they fall with 1/N.

# %% [markdown]
# This ring waits for each pass. In production the next pass is sent *while* a block is computed: it
# takes longer to compute (s/N)² pairs than to send s/N tokens if s/N is large enough. On a CPU no
# such overlap shows.

# %% [markdown]
# ## Gather them: Llama 3's way
#
# Llama 3 *all-gathers* K and V and then computes its queries' attention at once
# (*[paper](https://arxiv.org/abs/2407.21783)*, section 3.3.2); torch does so by default. The paper gives two
# reasons: one kernel call takes any mask, such as that of documents in a sequence, and with grouped-query
# heads K and V are small beside Q. You have built the collective already: `GatherToRegion`, whose
# backward sums each key's gradients over the ranks.

# %%
def gathered_attention(q, k, v, positions, group):
    """Attention to the keys of all ranks, gathered along the tokens."""
    k, v = (GatherToRegion.apply(x.transpose(1, 2), group).transpose(1, 2) for x in (k, v))
    places = lab.all_gather_sequence(positions[None], group)[0]
    return lab.causal_attention(q, k, v, positions, places)


# %% [markdown]
# ## Exchange tokens for heads: Ulysses
#
# Heads do not see each other. So in **Ulysses** (*[DeepSpeed](https://arxiv.org/abs/2309.14509)*) an
# all-to-all gives each rank *all tokens of 1/N of the heads*, ordinary attention follows, and a second
# all-to-all gives each rank back all heads of its tokens. The number of heads must be a multiple of N. With fewer key
# heads than ranks, each is sent to several ranks.

# %%
class Exchange(torch.autograd.Function):
    """Splits dimension `split` among the ranks, and joins along `join` what comes from them."""
    @staticmethod
    def forward(ctx, x, split, join, group):
        if x.shape[split] % group.size():
            raise ValueError(f"{group.size()} ranks cannot divide {x.shape[split]} heads equally")
        ctx.back = join, split, group
        pieces = torch.stack(x.chunk(group.size(), dim=split))  # one for each rank
        arriving = torch.empty_like(pieces)
        dist.all_to_all_single(arriving, pieces, group=group)
        return torch.cat(tuple(arriving), dim=join)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.back), None, None, None


# %%
def ulysses_attention(q, k, v, positions, group):
    """Attention to all keys, of this rank's part of the heads."""
    if k.shape[1] < group.size():  # a rank's query heads share one: a copy for each rank
        k, v = (x.repeat_interleave(group.size() // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))  # (batch, heads/N, s, d)
    places = lab.all_gather_sequence(positions[None], group)[0]
    return Exchange.apply(lab.causal_attention(q, k, v, places, places), 2, 1, group)


# %% [markdown]
# All three run next, with 8 query heads and 2 key heads. Count what a rank sends, in forward and backward
# together: gathering, K and V of N-1 pieces, and their gradients; Ulysses, (N-1)/N of q, k, v and out,
# twice. Guess: what does Ulysses send on 4 ranks, as a multiple of gathering?

# %%
# A guess, for the three ways
### BEGIN SOLUTION
my_guess = 12 / 8  # of a token's d numbers: (8 + 4 + 4 + 8) / 4 a rank and way, against 2 + 2
### END SOLUTION
labs.guess("7.11b", "bytes of Ulysses on 4 ranks, in those of gathering", my_guess)

# %%
lab.show_three_ways(ring_attention, gathered_attention, ulysses_attention)

# %% [markdown]
# **Notice:** with scores in memory, the ring's small blocks look far better. In tiles, as in every
# production kernel, the ring needs more than gathering on 2 and 4 ranks, and less on 8: K, V and their
# gradients of the complete sequence do not fall with N. With 8 query heads for 2 key heads, Ulysses sends
# more than gathering on 2 and 4 ranks, and as much on 8.

# %% [markdown]
# In general Ulysses sends less than gathering where N is larger than (query heads + key heads sent) / key
# heads. A ring sends most, but hides a pass behind a block that takes longer to compute. So heads, length and N
# decide. By these formulas, with one link of 400 Gbit/s for each GPU:

# %%
lab.show_context_parallel_choice()

# %% [markdown]
# **Notice:** where its blocks are long, a ring exposes nothing; short ones hide little (53 %). Llama 3 gathers
# all the same: with its heads that exposes 6 %, and one kernel call takes any mask. Ulysses would send twice
# as much. Without grouped queries gathering exposes 99 %; there Ulysses is better at 131,072 tokens, as
# long as N does not exceed the heads. A ring is best for a million tokens, where all K and V take gigabytes in a
# layer.

# %% [markdown]
# ## Who waits for whom
#
# A causal kernel skips the pairs in which the key is after the query. So if rank 0 has the first
# quarter of the sequence, it has nothing to do in rounds 1 to 3, while rank 3 computes in each. All
# wait for the slowest rank before K and V go on. Guess: how many times as long as with equal work do
# such contiguous pieces take, on 4 ranks?

# %%
# A guess, for exercise 7.12
### BEGIN SOLUTION
my_guess = 1.75
### END SOLUTION
labs.guess("7.12", "contiguous pieces on 4 ranks, as a multiple of equal work", my_guess)

# %% [markdown]
# ### Exercise 7.12 · Equal work in every round
#
# *Difficulty 3 of 5 · 12 minutes · target: in each round, the same number of pairs on all ranks*
#
# The sequence is cut into equal chunks, numbered from its beginning; `chunks` is a multiple of
# 2 · `ranks`. Each rank gets equally many of them.

# %%
# Exercise 7.12: which chunks of the sequence each rank gets
def assign(chunks, ranks):
    """For each rank the list of its chunks' numbers."""
    ### BEGIN SOLUTION
    pairs = [[head, chunks - 1 - head] for head in range(chunks // 2)]
    return [sum(pairs[rank::ranks], []) for rank in range(ranks)]
    ### END SOLUTION


# %%
lab.check_assign(assign)

# %% [markdown]
# <details><summary>Hint</summary>
#
# With 4 chunks, how many chunks of keys does each chunk of queries see? Which two together see as many
# as the other two?
#
# The first chunk sees the fewest keys and the last one the most: they are a pair. So are the second
# and the last but one. Give whole pairs to ranks.
#
# </details>

# %%
lab.show_rounds(assign, ring_attention)

# %% [markdown]
# **Notice:** above, rank 3 computes in every round and rank 0 in one. Below, all bars of a round are
# equally high. Your `ring_attention` computed both, because its mask follows the positions. These are
# pairs that a causal kernel computes; `lab.block_attention` computes and then masks them, so its seconds
# do not show this.

# %%
lab.show_assignments(assign)

# %% [markdown]
# **Notice:** contiguous pieces approach twice the time, and round robin with two chunks for each rank
# 1.5 times. Round robin token by token, "striped attention", is nearly even as well. Pairing head and
# tail, called zigzag, is exactly even, and is what torch and *[Llama 3](https://arxiv.org/abs/2407.21783)*
# do. They need it although they gather: then a rank's pairs in all rounds together count.

# %% [markdown]
# A whole model needs little more: each rank gets its tokens, their positions (for the rotary
# embedding) and their labels, which are shifted *before* the text is cut. Here a small Llama runs on
# real text, with your attention and your chunks:

# %%
lab.show_ring_in_llama(ring_attention, assign)

# %% [markdown]
# **Notice:** loss, logits and gradients are those of the whole text. For the weights, context
# parallelism is data parallelism: their gradients are summed over ranks.
#
# torch has this as `context_parallel`, which replaces `F.scaled_dot_product_attention` inside a block of
# code: with the zigzag, and by default with the keys gathered; `set_rotate_method("alltoall")` makes it a
# ring (*[tutorial](https://docs.pytorch.org/tutorials/unstable/context_parallel.html)*). It needs CUDA's
# fused kernels. On this machine:

# %%
lab.show_context_parallel()

# %% [markdown]
# ## Optional: Muon under sharding
#
# AdamW treats every number by itself, so ZeRO may cut anywhere. **Muon** does not: it orthogonalises
# the momentum of each weight *matrix* by **Newton-Schulz** iterations, products of the whole matrix.
# ZeRO-1 lays all matrices end to end and cuts at multiples of Ψ/N. What if a rank orthogonalises what
# it has? Computed from the gradients of a Llama of 3 layers, cut for 4 ranks:

# %%
lab.show_sharded_muon()

# %% [markdown]
# **Notice:** matrices that one rank has whole are right, and nothing raises. Those on a boundary get
# another update, 30 % off and more. The right-hand side happened in DeepSpeed
# (*[issue 7807](https://github.com/deepspeedai/DeepSpeed/issues/7807)*): after its reduce-scatter the rest
# of the matrix was still each rank's own gradient. It is fixed: refused since June 2026 (PR 8090), right
# since July (PR 8141). Its ZeRO-3 orthogonalised once for each micro-batch (issue 8443); the sum of these
# updates is not the update of the sum.

# %% [markdown]
# `lab.pieces_of(shapes, ranks)` says who has what: for each matrix a dict, rank → piece, with
# `in_matrix` and `in_shard`, slices of the flattened matrix and of the rank's flat shard.

# %%
for shape, pieces in zip([(2, 3), (4, 2)], lab.pieces_of([(2, 3), (4, 2)], ranks=2)):
    print(shape, {rank: (piece.in_matrix, piece.in_shard) for rank, piece in pieces.items()})

# %% [markdown]
# ### Exercise 7.13 · The update of a matrix that no rank has
#
# *Difficulty 4 of 5 · 30 minutes · target: the update of whole matrices; gradients are reduced once,
# and only matrices on a boundary travel*

# %%
# Exercise 7.13: Muon's update where ranks have pieces of matrices
def gather_matrix(shard, pieces, shape, group):
    """The whole matrix (rows, columns): this rank's piece from `shard`, the rest from the others."""
    ### BEGIN SOLUTION
    rank, batch = dist.get_rank(group), []
    whole = shard.new_empty(shape[0] * shape[1])
    mine = whole[pieces[rank].in_matrix].copy_(shard[pieces[rank].in_shard])
    for other in pieces.keys() - {rank}:
        theirs = whole[pieces[other].in_matrix]
        batch.append(dist.P2POp(dist.isend, mine, group=group, group_peer=other))
        batch.append(dist.P2POp(dist.irecv, theirs, group=group, group_peer=other))
    for work in dist.batch_isend_irecv(batch) if batch else []:
        work.wait()
    return whole.view(shape)
    ### END SOLUTION

# %% [markdown]
# `gradients` has one flat gradient for each micro-batch, N times as long as a shard: sum them, and give
# each rank the mean over ranks of its shard: `lab.reduce_scatter_single(output, input, group=group)`
# sums. Then momentum ← 0.95 · momentum + that mean, in place. `lab.newton_schulz(matrix)`
# orthogonalises. The result is this rank's shard of the update, with zeros in the padding.

# %%
def muon_update(gradients, momentum, shapes, group):
    """This rank's shard of the update; momentum is this rank's shard, updated in place."""
    ### BEGIN SOLUTION
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mean, update = torch.empty_like(momentum), torch.zeros_like(momentum)
    lab.reduce_scatter_single(mean, sum(gradients) / ranks, group=group)
    momentum.mul_(0.95).add_(mean)
    for shape, pieces in zip(shapes, lab.pieces_of(shapes, ranks)):
        if rank in pieces:
            matrix = gather_matrix(momentum, pieces, shape, group)
            orthogonal = lab.newton_schulz(matrix).flatten()
            update[pieces[rank].in_shard] = orthogonal[pieces[rank].in_matrix]
    return update
    ### END SOLUTION


# %%
lab.check_muon_update(muon_update)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Only ranks that own a piece of a matrix compute its update, and each keeps its own piece of the result.
#
# `gather_matrix`: memory for the whole flat matrix, and my piece into its place. With every other rank
# in `pieces`: send my piece, receive theirs into its place, all in one batch, which may be empty.
#
# `muon_update`: the gradients as the text above says. Then, for each matrix of which this rank has a
# piece: gather it from the *momentum*, orthogonalise, and copy my piece of the result.
#
# </details>

# %% [markdown]
# **Notice:** at most N-1 boundaries cut a matrix, whatever the model's size, so little travels. Both
# owners of a matrix compute the same update. The other way is to give each rank whole matrices: then
# nothing is gathered, but the shards are not equally long.

# %% [markdown]
# ## A script of your own
#
# A job combines dimensions: matrices are cut over a mesh's dimension "tensor", inside a node, and what is
# left is sharded over its dimension "data". Both are DTensors, so `parallelize_module` comes first and
# `fully_shard` after it.

# %% [markdown]
# | In your file | is |
# |:--|:--|
# | `mesh["tensor"]`, `mesh["data"]` | this rank's group in that dimension; `size()`, `get_local_rank()` |
# | `parallelize_module(model, mesh, {"model.layers.*.…": style})` | cuts each named module |
# | `ColwiseParallel(output_layouts=Replicate())` | gathers what it returns |
# | `DistributedSampler(samples, replicas, number, seed=…)` | samples of one replica |
#
# Where GPUs are, `torch.distributed.tensor.experimental.context_parallel(mesh, buffers=…)` cuts the
# sequence around forward and backward; torch has none for CPUs.

# %% [markdown]
# ### Exercise 7.28 · `tp.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: an equal part of every matrix on each rank; the saved model is
# the one that one process trains, for one replica of two ranks and for two*
#
# The next cell writes the file. Fill in its two gaps. There is no sequence parallelism in it, and logits
# are whole, so that the loop is that of `ddp.py`.

# %%
lab.write_script("tp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: seven projections of a layer, the embedding, the head. Without sequence parallelism norms
# need no style. An embedding is cut by rows, and its input lies whole on each rank.
#
# Second gap: how many parts have the samples, and which is this rank's? Ranks of one replica get the same.
#
# </details>

# %%
lab.check_tp("tp.py")

# %%
lab.torchrun("tp.py", "--tensor", 2, ranks=4)

# %% [markdown]
# **Notice:** torch says itself what a matrix that is cut in both dimensions costs where it is needed whole,
# for the file: two all-gathers, one after the other.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | gradients before a divided layer too small | no f |
# | output off by t − 1 biases | bias added on every rank |
# | gradients t times too large | an all-reduce that sums in backward, too |
# | norms' weights drift apart | gradients of s/t tokens, not summed |
# | dropout of heads repeats | one seed on all ranks |
# | hidden states differ | different seeds where ranks must agree |
# | a peak of b·s·v | gathered logits |

# %% [markdown]
# ## I can …
#
# - write f and g, and say which of them a layer needs where
# - cut attention with grouped-query heads, an MLP and a vocabulary over ranks
# - count a layer's all-reduces and their bytes
# - say what sequence parallelism saves
# - say which random numbers must agree, and which must not
# - write a job that cuts matrices and shards what is left
# - pass keys and values round a ring, with equal work, and say when gathering or Ulysses is better

# %% [markdown]
# ## What to read
#
# - Shoeybi et al., *Megatron-LM*, 2019, section 3: why is the first matrix of the MLP cut by columns?
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, section
#   4.2: which activations does sequence parallelism divide?
# - Liu, Zaharia, Abbeel, *Ring Attention with Blockwise Transformers*, 2023, section 3: how long must
#   a block be to hide its messages?
# - torch's tutorial on tensor parallelism: where does it use `PrepareModuleInput`, and why?

# %% [markdown]
# ## What comes next
#
# In **07b** the layers themselves are divided: each rank has some of them.
