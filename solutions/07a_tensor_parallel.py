# %% [markdown]
# # 07a · Tensor parallel
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 340 minutes in three sittings (145 + 70 + 125) |
# | **Needs** | any machine with 2 cores; no GPU |
#
# Under data parallelism, FSDP included, each rank has its own samples. Under tensor, sequence and
# context parallelism all ranks of a group work on the same samples: they shard the matrices, the
# vocabulary and the sequence.

# %% [markdown]
# *On a CPU* the collectives, their bytes and the memory of each rank are those of a GPU node. The
# seconds are not: on a CPU a collective takes about as long as the matrix product before it.

# %% [markdown]
# ## You will be able to
#
# - shard linear layers, attention and the vocabulary over ranks and keep training equal to the
#   reference;
# - say which collective each sharded layer needs, predict its bytes and count them;
# - compute a cross-entropy on sharded logits, and the global norm of sharded gradients.

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
# ## Why data parallelism is not enough
#
# A rank needs at least one complete sequence under FSDP, and it gathers complete layers. More ranks shard
# parameters, gradients and optimizer state further. They shrink neither the activations of that one
# sequence nor a gathered layer. The next cell predicts the peak memory of one of 16,384 ranks in
# bf16, with every layer checkpointed, for sequences of 8,192 and of 131,072 tokens.

# %%
lab.show_one_sequence(ranks=16_384)

# %%
{"millions of tokens in a batch, one sequence a rank": 16_384 * 8_192 / 1e6,
 "in Llama 3's largest batch": 16}

# %% [markdown]
# **Notice:** three of the four jobs need more than an H100 has, although the shards of parameters and
# optimizer state take less than 1 GB in each.
#
# The first job fits. But its batch has 134 million tokens, and Llama 3 was trained with at most 16
# million: a far larger batch needs more tokens for the same loss. So several ranks must share a
# sequence.

# %% [markdown]
# ## Column-parallel and row-parallel layers
#
# **Tensor parallelism** shards the weight matrices. For Z = tanh(X·A)·B on t ranks, split A by
# columns and B by rows. Then rank i computes Zᵢ = tanh(X·Aᵢ)·Bᵢ alone, and Z is the *sum* of all Zᵢ.
# Nothing is communicated between the two products. A is a **column-parallel** layer, B a
# **row-parallel** one.
#
# `nn.Linear` computes x·Wᵀ, and its weight has the shape [out, in]. So a column of A is a *row* of
# `weight`.

# %% [markdown]
# All ranks have the same X, and each has a shard of A. Does autograd then give each rank the right
# gradient of X? Two ranks try it, with A split by columns:

# %%
def gradient_of_the_input(is_sharded):
    torch.manual_seed(0)
    x = torch.randn(1, 3, requires_grad=True)
    weight = torch.randint(-9, 10, (4, 3)).float()
    rows = weight.chunk(2)[dist.get_rank()] if is_sharded else weight
    F.linear(x, rows).sum().backward()
    return x.grad[0].tolist()


partial = labs.launch(gradient_of_the_input, True, ranks=2, quiet=True)
full = labs.launch(gradient_of_the_input, False, ranks=2, quiet=True)
{"rank 0": partial[0], "rank 1": partial[1], "full gradient": full[0]}

# %% [markdown]
# **Notice:** each rank has only a part of the gradient. The full gradient is the sum of the parts.
#
# There is no error: the partial gradient has the shape of the full one.

# %% [markdown]
# ## The conjugate operators f and g
#
# So the sharded region needs one collective at its entry and one at its exit, each in one direction
# only. *[Megatron-LM](https://arxiv.org/abs/1909.08053)* calls them f and g. They are a **conjugate
# pair**:
#
# | name | where | forward | backward |
# |:--|:--|:--|:--|
# | f, `CopyToRegion` | at the entry, before A | copy | all-reduce |
# | g, `ReduceFromRegion` | at the exit, after B | all-reduce | copy |
#
# A `torch.autograd.Function` defines both directions. `backward` returns one gradient for each
# argument of `forward`, and None for a process group.

# %% [markdown]
# ### Exercise 7.1 · The conjugate pair
#
# *Difficulty 2 of 5 · 15 minutes · target: the sum over the group's ranks in one direction, a copy in
# the other, and no tensor of the caller is modified*
#
# `dist.all_reduce` works in place and needs a contiguous tensor. The gradient that `backward`
# receives may be transposed. Another layer may read it too: at a residual connection autograd passes
# one tensor to both branches. Store whatever `backward` needs on `ctx`.

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
# ## Sharded linear layers
#
# All shards of a layer have the same size. If the number of ranks does not divide the layer's size,
# slices would overlap or leave rows out, and the layer would train with wrong numbers. So the sizes
# are checked before a layer is sharded:

# %%
def share(size, group, what):
    """Returns size / t for the t ranks of the group; raises ValueError if t does not divide it."""
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise ValueError(f"{what}: {size} is not divisible by {ranks} ranks; use a number that is")
    return size // ranks


labs.launch(lambda: share(36, dist.group.WORLD, "rows"), ranks=3, quiet=True)

# %% [markdown]
# ### Exercise 7.2 · Column- and row-parallel layers
#
# *Difficulty 3 of 5 · 20 minutes · target: outputs and gradients of the unsharded layers, 1/t of the
# weights in memory, one all-reduce in forward*
#
# `column_shard` returns an `nn.Linear` with this rank's rows of weight and bias. A
# `RowParallelLinear` has this rank's columns as `weight`, and `bias`. Its input is this rank's part of
# the features. Its output is complete: it contains g, not f. A slice is a view of the full weight.

# %%
# Exercise 7.2: a linear layer sharded by its outputs, and one sharded by its inputs
def column_shard(linear, group):
    """Returns an nn.Linear with this rank's out/t rows of the weight and of the bias, if any."""
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
# <details><summary>Hint</summary>
#
# The all-reduce would count a bias t times if each rank added it before. So it is added after the
# sum. The bias is replicated: every rank adds all of it, and its gradient is the same on all ranks.
#
# `dist.get_rank(group)` is this rank's number in the group. Split along dimension 0 for rows and
# along dimension 1 for columns, and copy this rank's part into new memory. Use the layer's dtype and
# device.
#
# </details>

# %% [markdown]
# ## Tensor parallelism in Llama
#
# Attention is sharded by heads. Each head has its own rows of the query, key and value layers, and its
# own columns of the output layer. Llama uses **grouped-query attention**: several query heads share
# one key and value head. A rank needs the query heads of a group together with their key and value
# head.
#
# In the MLP, `gate_proj` and `up_proj` are column-parallel and `down_proj` is row-parallel. Embedding,
# norms and head stay replicated for now.

# %%
model = lab.llama(layers=1)
{name: list(parameter.shape) for name, parameter in model.model.layers[0].named_parameters()}

# %% [markdown]
# Hugging Face's attention computes the number of heads from the shapes of its layers' outputs. So it
# is enough to replace the layers. `lab.map_input(module, function)` applies a function to the hidden
# states at a module's entry, before its forward:

# %%
layer = nn.Linear(2, 3)
lab.map_input(layer, lambda hidden: 2 * hidden)
x = torch.ones(1, 2)
torch.equal(layer(x), F.linear(2 * x, layer.weight, layer.bias))

# %% [markdown]
# Let b be the sequences of a batch, s the tokens of a sequence, and h the hidden size. How many
# all-reduces of b·s·h elements does a rank take part in for each layer and step, forward and backward
# together?

# %%
# A guess, for exercise 7.3
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("7.3", "all-reduces of b·s·h elements for a layer and step", my_guess)

# %% [markdown]
# ### Exercise 7.3 · Tensor-parallel attention and MLP
#
# *Difficulty 4 of 5 · 30 minutes · target: equal to the reference over 5 steps, 1/t of each layer's
# matrices on a rank, 4 all-reduces of b·s·h a layer and step*
#
# All ranks get the same batch. Raise ValueError if heads, key-value heads or the MLP's inner size
# are not divisible by t. The message names the module (`self_attn` or `mlp`), both numbers and the
# remedy. `group=None` means all ranks. Create the optimizer last.

# %%
# Exercise 7.3: shards attention and MLPs of a Llama over the ranks of a group
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

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each module has one entry, which needs f, and one exit, which needs g. The query, key and value
# layers share their input. Autograd first adds their gradients on each rank; f then sums them over
# the ranks, once.
#
# The rows may be divisible by t where the heads are not: 6 heads of 8 are 48 rows, and 4 ranks would
# split a head. So call `share` with the number of heads. Then, for each of `model.model.layers`, and
# for attention and MLP: replace the layers with `setattr`, and apply f to the module's input.
#
# </details>

# %%
lab.show_shards(tensor_parallel, ranks=4)

# %% [markdown]
# Column-parallel layers are split by rows of `weight`, row-parallel ones by columns.
#
# Each rank has complete heads: 2 of 8 query heads, which are 32 rows, and the key and value head that
# they share. The weights of the RMSNorm layers are replicated and tiny. But every rank still has the
# full embedding and the full head.

# %% [markdown]
# ## All-reduces of a layer
#
# It would also be correct to apply f at the entry of *each* column-parallel layer, because a sum of
# sums is the sum. The lab builds this variant from your functions and counts the all-reduces of both,
# on 2 ranks:

# %%
lab.show_all_reduces(tensor_parallel, CopyToRegion, column_shard, RowParallelLinear)

# %% [markdown]
# **Notice:** both train to the same numbers, but f at each layer sends 7 all-reduces instead of 4. In
# backward it sends one for each of attention's three layers and one for each of the MLP's two.
#
# DDP's all-reduces overlap with backward. Those of tensor parallelism are exposed, because the next
# product needs their result. So tensor parallelism stays where links are fast, inside a node.

# %% [markdown]
# Now the memory: parameters, gradients and optimizer state of this small Llama together. Guess: by
# what factor does one of 4 ranks need less of it than a single rank?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 4
### END SOLUTION
labs.guess("7.3b", "times smaller on one of 4 ranks, with AdamW in fp32", my_guess)

# %%
lab.show_resident_bytes(tensor_parallel)

# %% [markdown]
# **Notice:** attention and MLP shrink as 1/t. Embedding, head and norms are replicated, so the bars
# stay above the prediction for a fully sharded model.
#
# Embedding, head and norms are 13 % of the parameters, here as in Llama-3-8B. On 8 ranks they would be
# more than half of a rank's memory. So the vocabulary is sharded next.

# %% [markdown]
# ## Vocabulary parallelism
#
# Exercise 7.3 leaves embedding and head replicated. Llama-3-8B has a vocabulary of v = 128,256
# tokens, so the head computes v logits for each position. The loss needs 12 bytes for each logit at
# its peak: the log-softmax and two gradients, in fp32. How many GB is that for b·s = 8,192
# positions?

# %%
words, hidden, tokens = 128_256, 4096, 8192
{"GB of embedding and head, bf16": 2 * 2 * words * hidden / 1e9,
 "GB of the loss at its peak": 12 * tokens * words / 1e9,
 "GB of hidden states between two layers, bf16": 2 * tokens * hidden / 1e9}

# %% [markdown]
# The loss needs the most memory, and t ranks would all compute the same one. Under **vocabulary
# parallelism** each rank has v/t consecutive rows of the embedding, and the same rows of the head.
#
# v must be divisible by t. Training programs pad the vocabulary with rows until it is. No token ever
# looks up these rows, but their logits must be −∞ in the loss. Llama-3's 128,256 is 501 · 256.

# %%
def rows_of_rank(count, group):
    """Returns the range of this rank's rows, of `count`."""
    rows, rest = divmod(count, dist.get_world_size(group))
    if rest:
        raise ValueError(f"{count} rows, {dist.get_world_size(group)} ranks: pad to a multiple")
    first = rows * dist.get_rank(group)
    return range(first, first + rows)


labs.launch(lambda: rows_of_rank(128_256, dist.group.WORLD), ranks=2, quiet=True)

# %% [markdown]
# ### Exercise 7.4 · Vocabulary-parallel embedding
#
# *Difficulty 3 of 5 · 15 minutes · target: 1/t of the rows, in memory of their own; one all-reduce of
# b·s·h in forward, none in backward*
#
# Every rank looks up all tokens, and returns zeros for other ranks' rows. So the sum over the ranks
# has each row once.
#
# `embedding.padding_idx` is None or the index of a row that gets no gradient. `F.embedding` has this
# argument too, as an index into the rows that it is given.

# %%
# Exercise 7.4: an embedding of which each rank has v/t rows
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

# %%
lab.check_vocabulary_embedding(VocabularyParallelEmbedding)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `F.embedding` fails at an index out of range. So look up any valid row there, and replace the result
# with zeros.
#
# In `__init__`: this rank's rows, cloned, as the parameter `self.weight`. The padding row is on one
# rank only. Which index does it have there? It is None on the others.
#
# In `forward`: shift the tokens to this rank's indices; mask those out of range; look up a valid index
# in their place; set their results to zero; sum over the group. The gradient of the sum is the same on
# every rank, so backward copies it.
#
# </details>

# %% [markdown]
# In backward each rank computes the complete gradient of its own rows. No collective is needed,
# because every rank has the gradient of the output.

# %% [markdown]
# ## Cross-entropy on sharded logits
#
# The head is column-parallel: f before it, v/t logits of each position after it. Gathering the logits
# would cost all the memory again. The loss of a position with target y needs few numbers of them:
#
# $$-\log\frac{e^{x_y}}{\sum_j e^{x_j}} = \log\sum_j e^{x_j - m} - (x_y - m)\qquad m = \max_j x_j$$
#
# How many numbers must the ranks all-reduce for each position, instead of gathering v?

# %%
# A guess, for exercise 7.5
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("7.5", "numbers that the loss all-reduces for each token", my_guess)

# %% [markdown]
# An all-reduce inside autograd can go wrong silently in two ways:
#
# - `dist.all_reduce` works in place, and autograd does not see it. If an operation saved that tensor
#   for backward, as `exp` saves its result, the gradient is wrong.
# - torch's differentiable all-reduce sums gradients in backward too. That is right if each rank has
#   its own loss. Here all ranks compute *the same* loss, so the gradient would be t times too large.
#
# `ReduceFromRegion` of exercise 7.1 avoids both.

# %% [markdown]
# ### Exercise 7.5 · Vocabulary-parallel cross-entropy
#
# *Difficulty 4 of 5 · 30 minutes · target: three numbers of each position are communicated; correct
# for logits of ±10,000 and for bf16*
#
# `logits` are this rank's part of the vocabulary, of shape (…, v/t), in the order of the ranks.
# `targets` has one token for each position. A target of −100 is ignored: it counts neither in the sum
# nor in the mean. Compute in fp32. The maximum cancels in the formula, so it needs no gradient.

# %%
# Exercise 7.5: cross-entropy on logits that are sharded along the vocabulary
def vocabulary_parallel_cross_entropy(logits, targets, group):
    """Returns the mean loss over the targets that are not -100."""
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
# Now embedding, head and loss of a Llama. `lab.set_loss(model, function)` makes `function(logits,
# targets)` its loss; targets are the labels, shifted by one.
#
# **Tied** weights are one parameter for embedding and head, so their shards are one parameter too:
# rank r has the same rows of both. Backward adds up both gradients on the rank, and this sum is
# complete. An all-reduce would add the gradients of other ranks' rows.
#
# `model.get_input_embeddings()`, `get_output_embeddings()` and their setters are Hugging Face's.

# %%
# Exercise 7.5: shards embedding, head and loss of a Llama
def vocabulary_parallel(model, group):
    """Replaces all three in place; a tied weight stays one parameter."""
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

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each rank computes its own part of three numbers: the maximum of its logits, the sum of its
# exponentials, and the target's logit if the target is in its range.
#
# All-reduce the maximum of detached logits with `dist.ReduceOp.MAX`, and subtract it from the logits.
# Sum the exponentials over the rank's part, then over the ranks. For the target's logit do as in
# exercise 7.4: `logits.gather(-1, ...)` with some valid index, zeros where another rank has the row,
# then the sum. −100 is in no rank's range. At the end take the mean over the targets that are not
# −100.
#
# </details>

# %%
lab.show_loss_cost(vocabulary_parallel_cross_entropy)

# %% [markdown]
# On 4 ranks the peak is a quarter, and the bytes that a rank sends no longer depend on
# the size of the vocabulary.

# %% [markdown]
# ## The global norm of sharded gradients
#
# Gradient clipping scales all gradients by max_norm / norm if the norm exceeds max_norm. The norm is
# the root of the sum of the squares of *all* elements. A rank has only the squares of its own shards.
# But a replicated parameter, such as the weight of an RMSNorm layer, has the same gradient on every
# rank. Two ranks call `torch.nn.utils.clip_grad_norm_` on their shards:

# %%
def norm_of_one_rank():
    torch.manual_seed(dist.get_rank())
    shard = nn.Parameter(torch.zeros(8))  # one of two shards of a parameter with 16 elements
    shard.grad = torch.randn(8)
    return nn.utils.clip_grad_norm_([shard], 1.0).item()


labs.launch(norm_of_one_rank, ranks=2, quiet=True)

# %% [markdown]
# The two ranks get different norms for one gradient. Each rank would scale its shard of the same
# weight by a different factor.

# %% [markdown]
# ### Exercise 7.6 · Clip by the global norm
#
# *Difficulty 2 of 5 · 15 minutes · target: every square counted once; one number is communicated*
#
# `sharded` and `replicated` are lists of parameters. Either may be empty, and a parameter may have no
# gradient. Scale the gradients in place, only if the norm is too large, and return the norm before
# clipping.

# %%
# Exercise 7.6: clip by the norm of all gradients of all ranks
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
# The check also trains a Llama with it, of which every matrix is sharded: the layers by your
# `tensor_parallel`, embedding, head and loss by your `vocabulary_parallel`.

# %%
def fully_sharded_llama(model, optimizer_class, **settings):
    vocabulary_parallel(model, dist.group.WORLD)
    return tensor_parallel(model, optimizer_class, **settings)

# %%
lab.check_clip_grad_norm(clip_grad_norm, fully_sharded_llama)

# %%
lab.show_norms(clip_grad_norm, vocabulary_parallel, fully_sharded_llama)

# %% [markdown]
# **Notice:** on the right, counting the replicated parameters four times changes nothing visible,
# because only the small weights of RMSNorm are replicated. On the left all layers are replicated, and
# the same mistake is obvious.
#
# So a wrong norm can pass every test with one layout and harm training with another: clipped steps
# are then too small by the same factor.

# %% [markdown]
# ## Second sitting · 70 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 7.7, 7.8, 7.9 |
# | **Optional** | none |
# | **In a new kernel** | run the cell of the imports, and the cells of exercises 7.1, 7.2 and 7.3 |
#
# You will be able to:
#
# - say what sequence parallelism shards, and which collectives it needs;
# - find the gradients that are partial under sequence parallelism;
# - give each rank the random numbers that it needs for dropout;
# - write a plan for torch's `parallelize_module`.

# %% [markdown]
# ## Activations that tensor parallelism replicates
#
# Tensor parallelism shards attention and the MLP. But every rank keeps the inputs of a layer's two
# norms for backward, their normalized inputs and their outputs: 6·b·s·h numbers. Attention keeps
# queries, keys, values and its output. The MLP keeps four tensors of its inner size. The next cell
# computes both in GB for Llama-3-8B and one sequence of 8,192 tokens in bf16, on one rank and on
# t = 8.

# %%
tokens, hidden, inner, layers = 8192, 4096, 14_336, 32
gb_per_bsh = 2 * tokens * hidden * layers / 1e9  # b·s·h numbers of 2 bytes in every layer
inside = (1 + 2 * 8 / 32 + 1) + 4 * inner / hidden  # 8 key and value heads for 32 query heads
print(f"a layer keeps {6 + inside:.1f} b·s·h numbers, {inside:.1f} of them in attention and MLP")
{t: {"norms": round(6 * gb_per_bsh, 1), "attention and MLP": round(inside * gb_per_bsh / t, 1)}
 for t in (1, 8)}

# %% [markdown]
# **Notice:** on 8 ranks, the replicated activations of the norms take almost three times as much
# memory as a rank's part of attention and MLP.
#
# A norm and a residual addition treat each token separately. So between attention and MLP a rank can
# work on s/t tokens. This is **sequence parallelism**. Attention and MLP need all tokens: an
# all-gather along the sequence comes at their entry, and a reduce-scatter replaces the all-reduce at
# their exit.

# %% [markdown]
# | function | forward | backward |
# |:--|:--|:--|
# | f, `CopyToRegion` | copy | all-reduce |
# | g, `ReduceFromRegion` | all-reduce | copy |
# | `GatherToRegion` | all-gather | exercise 7.7 |
# | `ReduceScatterFromRegion` | reduce-scatter | its reverse |
#
# Guess: how many bytes does a rank send for a layer in forward and backward, as a multiple of what it
# sends with f and g?

# %%
# A guess, for exercise 7.7
### BEGIN SOLUTION
my_guess = 1
### END SOLUTION
labs.guess("7.7", "bytes per layer, as a multiple of tensor parallelism", my_guess)

# %% [markdown]
# torch's `all_gather_single` and `reduce_scatter_single` work along dimension 0. Hidden states have the
# shape (b, s, h), so both functions move the sequence to dimension 0 and back:

# %%
def all_gather_sequence(x, group):  # (b, s/t, h) -> (b, s, h), in the order of the ranks
    x = x.transpose(0, 1).contiguous()
    gathered = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_single(gathered, x, group=group)
    return gathered.transpose(0, 1).contiguous()


def reduce_scatter_sequence(x, group):  # (b, s, h) -> (b, s/t, h): this rank's tokens of the sum
    x = x.transpose(0, 1).contiguous()
    piece = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_single(piece, x, group=group)
    return piece.transpose(0, 1).contiguous()

# %% [markdown]
# Neither of them has a gradient. Two ranks, two tokens each:

# %%
def both_collectives():
    piece = torch.full((1, 2, 1), dist.get_rank() + 1.0, device=labs.device())
    gathered = all_gather_sequence(piece, dist.group.WORLD)
    summed = reduce_scatter_sequence(gathered, dist.group.WORLD)
    return gathered.flatten().tolist(), summed.flatten().tolist()


labs.launch(both_collectives, ranks=2, quiet=True)

# %% [markdown]
# ### Exercise 7.7 · Sequence parallelism
#
# *Difficulty 4 of 5 · 30 minutes · target: 4 all-gathers and 4 reduce-scatters of b·s·h a layer and
# step, and the losses of the reference*
#
# First the function at the entry of attention and MLP. In the region each rank uses the gathered tensor
# with its own shard of the weights. Which gradient of its own tokens does a rank need?

# %%
# Exercise 7.7: gathers all tokens at the entry of attention and MLP
class GatherToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # (b, s/t, h) -> (b, s, h)
        ### BEGIN SOLUTION
        ctx.group = group
        return all_gather_sequence(x, group)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return reduce_scatter_sequence(gradient, ctx.group), None
        ### END SOLUTION

# %% [markdown]
# The function at their exit is the reverse and is given:

# %%
class ReduceScatterFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # (b, s, h) -> (b, s/t, h)
        ctx.scattered_over = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather_sequence(gradient, ctx.scattered_over), None

# %% [markdown]
# A parameter that is applied to s/t tokens gets a *partial* gradient: the sum over this rank's tokens.
# There is no error. The replicas of the parameter need the sum over all ranks.
# `parameter.register_hook(function)` makes autograd use `function(gradient)` in place of the gradient
# of each backward pass. Two ranks, two tokens each; without the hook rank 0 has 2 and rank 1 has 4:

# %%
def sum_gradient(parameter, group):
    """Makes autograd sum the parameter's gradient over the ranks of the group."""
    def summed(partial):
        result = partial.clone()
        dist.all_reduce(result, group=group)
        return result

    if parameter.requires_grad:  # a frozen parameter has no gradient
        parameter.register_hook(summed)

# %%
def gradient_of_a_replica():
    weight = nn.Parameter(torch.ones(1, device=labs.device()))
    sum_gradient(weight, dist.group.WORLD)
    tokens = torch.full((1, 2, 1), dist.get_rank() + 1.0, device=labs.device())
    (weight * tokens).sum().backward()
    return weight.grad.tolist()


labs.launch(gradient_of_a_replica, ranks=2, quiet=True)

# %% [markdown]
# A row-parallel layer now ends in `ReduceScatterFromRegion`. Its bias, if it has one, is added to this
# rank's tokens, so its gradient is partial:

# %%
class RowParallelToPiece(RowParallelLinear):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.scattered_over = group
        if self.bias is not None:
            sum_gradient(self.bias, group)

    def forward(self, x):  # (b, s, in/t) -> (b, s/t, out)
        product = F.linear(x, self.weight)
        piece = ReduceScatterFromRegion.apply(product, self.scattered_over)
        return piece if self.bias is None else piece + self.bias

# %% [markdown]
# Embedding and head work on all tokens on every rank.
# `lab.split_hidden_states`, called with a model and a group, installs the split between them:
#
# | where | forward | backward |
# |:--|:--|:--|
# | before the first layer | this rank's tokens | all-gather |
# | after the last norm | all-gather | this rank's tokens |
#
# After the last norm all ranks compute the same loss, so each has the complete gradient: a sum would be
# t times too large. Attention masks and rotary angles stay those of all tokens.

# %% [markdown]
# Now the strategy. Some parameters of a Llama are applied to s/t tokens. Call `sum_gradient` for each
# of them.

# %%
# Exercise 7.7: tensor_parallel, with s/t tokens on each rank between attention and MLP
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
        sum_gradient(layer.input_layernorm.weight, group)
        sum_gradient(layer.post_attention_layernorm.weight, group)
    sum_gradient(model.model.norm.weight, group)
    lab.split_hidden_states(model, group)
    return model, optimizer_class(model.parameters(), **settings)
    ### END SOLUTION

# %%
lab.check_sequence_parallel(GatherToRegion, ReduceScatterFromRegion, sequence_parallel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Each rank multiplies the gathered tensor by its own shard of the weights. So each rank has a different
# gradient for every token, and the gradient is their sum. A rank needs it for its own tokens only.
#
# `sequence_parallel`: start from your `tensor_parallel`. `RowParallelToPiece` replaces `RowParallelLinear`,
# and `GatherToRegion` replaces `CopyToRegion`. Three kinds of norms see s/t tokens: the two of each layer,
# and `model.model.norm`. Each has one parameter, `weight`.
#
# </details>

# %%
lab.show_activations(tensor_parallel, sequence_parallel)

# %% [markdown]
# **Notice:** tensor parallelism shards only the activations inside attention and MLP. Sequence
# parallelism shards those of the norms too.
#
# The gathered input of attention and MLP stays complete on every rank, because the first matrices
# need it in backward. Megatron-LM saves only this rank's tokens of it and gathers them again in
# backward. Then everything is divided by t, for one more all-gather in each region.

# %%
lab.show_layer_collectives(tensor_parallel, sequence_parallel)

# %% [markdown]
# One all-gather and one reduce-scatter replace each all-reduce. Each of the two sends half of its
# bytes. So a layer sends as many bytes as before, and keeps fewer activations. New are the small
# all-reduces of the norms' gradients, of h numbers each.

# %% [markdown]
# ## Random streams for dropout
#
# Dropout draws random numbers. Should ranks draw the same ones or different ones? Four ranks have two
# of 8 heads each. If all of them use one seed, how many different masks do the 8 heads get?

# %%
def masks_of_heads():
    torch.manual_seed(0)  # the same seed on every rank
    return F.dropout(torch.ones(2, 16, 16), 0.1)


torch.cat(labs.launch(masks_of_heads, ranks=4, quiet=True)).unique(dim=0).shape[0]

# %% [markdown]
# Only two: the heads of every rank get the masks of rank 0's heads. The opposite mistake is silent
# too. Outside attention and MLP, plain tensor parallelism needs *equal* hidden states on all ranks.
# With different masks they differ from there on. So a rank needs two **random streams**:
#
# | dropout of | random numbers |
# |:--|:--|
# | replicated hidden states (tensor parallelism, outside the regions) | the same on all ranks |
# | a shard: this rank's heads or tokens | different on each rank |

# %% [markdown]
# ### Exercise 7.8 · Two random streams
#
# *Difficulty 3 of 5 · 15 minutes · target: equal masks where ranks must agree, and no mask twice
# anywhere else*
#
# A `torch.Generator().manual_seed(n)` has its own stream: `torch.rand(shape, generator=...)`, on the
# CPU. Each of 2,048 data-parallel replicas creates this object for its own group, with seed 0, 1, 2
# and so on. No two replicas may share a stream. Do not use torch's default generator, because other
# code draws from it too.

# %%
# Exercise 7.8: one stream shared by the group, and one of this rank alone
class DropoutStreams:
    def __init__(self, seed, group):
        ### BEGIN SOLUTION
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        first = seed * (ranks + 1)
        self.shared = torch.Generator().manual_seed(first)
        self.own = torch.Generator().manual_seed(first + 1 + rank)
        ### END SOLUTION

    def dropout(self, x, p, is_shard):  # zeros with probability p; the rest is divided by 1 - p
        ### BEGIN SOLUTION
        generator = self.own if is_shard else self.shared
        keep = torch.rand(x.shape, generator=generator).to(x.device) >= p
        return x * keep / (1 - p)
        ### END SOLUTION

# %% [markdown]
# When a job resumes, it needs the streams in the same state. `generator.get_state()` returns a
# tensor, and `generator.set_state(tensor)` restores it.

# %%
# Exercise 7.8: the state of both streams in a rank's checkpoint
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

# %%
lab.check_dropout_streams(ResumableStreams)

# %% [markdown]
# <details><summary>Hint</summary>
#
# What must the seed of each stream depend on? The shared one depends on `seed`, not on the rank. The
# rank's own one depends on both, and it must differ from every rank's shared one.
#
# Write down the seeds of two replicas with 2 ranks each. With seed + 1 + rank, which number appears
# twice? Leave a gap between replicas: multiply `seed` by something that depends on the number of
# ranks. Seed each generator once, in `__init__`. A generator that is seeded in each call draws the
# same mask in each step.
#
# </details>

# %%
lab.show_masks(ResumableStreams)

# %% [markdown]
# In the first three columns all rows are equal; in the last three all rows differ. Under sequence
# parallelism the dropout between the regions uses the rank's own stream: its input is s/t tokens, and
# its mask takes 1/t of the memory. A checkpoint must contain *each* rank's own stream.

# %% [markdown]
# ## torch's `parallelize_module`
#
# `parallelize_module(model, mesh, plan)` shards a model in place. The plan maps the name of a module
# to a **parallel style**; `*` in a name stands for all layers:
#
# | style | does |
# |:--|:--|
# | `ColwiseParallel()` | column-parallel: replicated input, output sharded by features |
# | `RowwiseParallel(output_layouts=Shard(1))` | row-parallel, then a reduce-scatter along dimension 1 |
# | `SequenceParallel()` | a norm on this rank's tokens |
# | `PrepareModuleInput(...)` | changes the layout of a module's inputs at its entry |

# %% [markdown]
# A **layout** says where a tensor's elements are. `Replicate()`: all of them on every rank. `Shard(1)`:
# split along dimension 1. `Partial("sum")`: each rank has a part of the sum. A sharded parameter is a
# `DTensor`, which knows its layout. The plan for the modules outside the layers is given, with a
# sharded vocabulary:

# %%
OUTSIDE = {
    "model.embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "model.layers.0": tp.PrepareModuleInput(  # split, as lab.split_hidden_states does
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    "model.norm": tp.SequenceParallel(),
    "lm_head": tp.ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}

# %% [markdown]
# So are the entries of attention and MLP, where `GatherToRegion` was. A layer calls
# `self_attn(hidden_states=..., ...)` with a keyword and `mlp(x)` with a positional argument. So the two
# entries have different arguments:

# %%
ENTRIES = {
    "self_attn": tp.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()}),
    "mlp": tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
}

# %% [markdown]
# ### Exercise 7.9 · A plan for a layer of Llama
#
# *Difficulty 3 of 5 · 12 minutes · target: the reference's losses on 2 and 4 ranks, with the
# collectives of your own sequence parallelism*
#
# `layer_plan` returns a dict: the name of each module that has parameters → its style. Names are
# relative to a layer, as in the first output of "Tensor parallelism in Llama", without `.weight`. Each
# line of your `sequence_parallel` has a counterpart, except one.

# %%
# Exercise 7.9: name of a module in a layer -> parallel style
def layer_plan():
    ### BEGIN SOLUTION
    column, norm = tp.ColwiseParallel(), tp.SequenceParallel()
    row = tp.RowwiseParallel(output_layouts=Shard(1))
    return {
        "input_layernorm": norm, "post_attention_layernorm": norm,
        "self_attn.q_proj": column, "self_attn.k_proj": column, "self_attn.v_proj": column,
        "self_attn.o_proj": row,
        "mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row}
    ### END SOLUTION

# %%
def torchs_parallel(model, optimizer_class, **settings):
    mesh = init_device_mesh(labs.device().type, (dist.get_world_size(),))
    in_layer = {**ENTRIES, **layer_plan()}
    in_layers = {f"model.layers.*.{name}": style for name, style in in_layer.items()}
    model = tp.parallelize_module(model, mesh, {**OUTSIDE, **in_layers})
    optimizer = optimizer_class(model.parameters(), **settings)
    return model, optimizer


lab.check_torchs_parallel(torchs_parallel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Nine modules of a layer have parameters: two norms and seven matrices.
#
# Go through your `sequence_parallel`: which style is `column_shard`, which one is `RowParallelToPiece`?
# Which layout has the output of the latter, and along which dimension? `sum_gradient` has no
# counterpart, because a DTensor knows that its gradient is partial.
#
# </details>

# %% [markdown]
# The check trains inside `with loss_parallel():`, which computes the cross-entropy on sharded logits.
# torch's `CommDebugMode` counts the collectives of a DTensor program. The lab counts all collectives of
# the process group. Both for one step, forward and backward:

# %%
lab.show_comm_debug(torchs_parallel)

# %%
lab.show_collectives_of_plan(tensor_parallel, sequence_parallel, torchs_parallel)

# %% [markdown]
# torch's plan sends the same collectives as your sequence parallelism. Only the small all-reduces of
# the norms' gradients come at another time: yours in backward, torch's when the optimizer reads the
# gradient.

# %% [markdown]
# ## Partial gradients of DTensors
#
# The gradient of a norm under sequence parallelism is partial, with DTensors too. Two ranks, two
# tokens each:

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
# **Notice:** `to_local()` returns this rank's part of the sum, without an error. `full_tensor()`
# reduces it first.
#
# An optimizer, gradient clipping and logging must use the reduced gradient. Otherwise the replicas of
# a norm's weight diverge.

# %% [markdown]
# ## Third sitting · 125 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 7.10, 7.11, 7.12, 7.28 |
# | **Optional** | none |
# | **In a new kernel** | run the cell of the imports, `all_gather_sequence` and `GatherToRegion` |
#
# You will be able to:
#
# - merge partial attentions by an online softmax, and pass keys and values around a ring;
# - balance the work of causal attention over ranks;
# - say when gathering keys and values, a ring or Ulysses is better;
# - write a job that combines tensor parallelism with FSDP.

# %% [markdown]
# ## Context parallelism
#
# Llama 3 was trained on sequences of 131,072 tokens. How much does one of its layers keep for
# backward? For Llama-3-8B you counted 6 + 16.5 numbers of b·s·h in the second sitting; in 16 bits
# that is 45·s·b·h bytes. (Notebook 01's 34·s·b·h is another model's: a GPT with dropout and an MLP
# of 4·h.) An attention kernel that keeps the scores needs 2·a·b·s² bytes more, for a heads:

# %%
s, h, layers, heads = 131_072, 4096, 32, 32
activations = layers * 45 * s * h  # bytes
nbytes = {"all activations": activations, "scores of one layer": 2 * heads * s**2,
          "activations on each of 16 ranks": activations / 16}
{name: f"{size / 1e9:,.1f} GB" for name, size in nbytes.items()}

# %% [markdown]
# No GPU has memory for 773 GB. Tensor parallelism shards them only over GPUs that are joined by
# NVLink: 8 in a host of H100s, 72 in a rack of
# *[GB200 NVL72](https://www.nvidia.com/en-us/data-center/gb200-nvl72/)*. In **context parallelism**
# each rank has s/N tokens of the sequence in *every* layer. Norms, linear layers and the MLP need no
# other tokens. Attention does: a query needs the keys and values of all tokens before it. Llama 3 used
# *[16 ranks](https://arxiv.org/abs/2407.21783)* for each such sequence.

# %% [markdown]
# ## Online softmax: merge partial attentions
#
# A rank receives the keys block by block, so it computes the softmax in parts. This is an **online
# softmax**. For a block of keys, `lab.block_attention(q, k, v, visible)` returns `out`, the attention
# to these keys alone, and `lse`, the logarithm of the sum of their exponentials. `visible` is the mask:
# True where a query sees a key.

# %%
q, k, v = (torch.randn(1, 2, tokens, 4) for tokens in (3, 5, 5))  # batch, heads, tokens, d
visible = torch.arange(3)[:, None] >= torch.arange(5)  # query 0 sees key 0, query 1 two keys, ...
out, lse = lab.block_attention(q, k, v, visible)
out.shape, lse.shape, lab.block_attention(q, k, v, torch.zeros_like(visible))[1][0, 0]

# %% [markdown]
# If a query sees no key of a block, its lse is -inf and its out is 0. In float32, exp of anything above
# 88 is infinite, and scores of real models get that large.
#
# ### Exercise 7.10 · Merge two partial attentions
#
# *Difficulty 3 of 5 · 12 minutes · target: the attention to the keys of both parts, for any scores,
# and no NaN where a query sees no key*

# %%
# Exercise 7.10: merge two partial attentions of the same queries
def merge(out_a, lse_a, out_b, lse_b):
    """Returns (out, lse) of the attention to the keys of both; out (..., d), lse (...)."""
    ### BEGIN SOLUTION
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weight_a = (lse_a - finite).exp()[..., None]
    weight_b = (lse_b - finite).exp()[..., None]
    return weight_a * out_a + weight_b * out_b, lse
    ### END SOLUTION


# %%
lab.check_merge(merge)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Multiply each part by its own sum of exponentials, add, and divide by the sum of both.
#
# The sum of both is exp(lse_a) + exp(lse_b), and its logarithm is the new lse. torch has a function
# that computes this without overflow. The weight of a part is exp(its lse - the new lse), which is at
# most 1. Where both are -inf, the difference is NaN: subtract 0 there.
#
# </details>

# %% [markdown]
# The weights of both parts add up to 1, and only differences of lse are exponentiated. FlashAttention
# merges blocks of scores in this way inside one GPU. A ring does it over ranks.

# %% [markdown]
# There are three ways to bring all keys to all queries: gather them, exchange tokens for heads, or
# pass them around a ring. You write the ring, the most difficult one, and then compare it with the
# other two.

# %% [markdown]
# ## Ring attention
#
# In **ring attention** K and V are sent from rank to rank, and the queries stay. Each rank sends its
# current K and V to the next rank. All sends and receives are issued in *one batch*. If `isend` and
# `irecv` are issued one after the other, NCCL deadlocks: each rank's send waits until the next rank
# receives, and no rank receives. gloo buffers, so on a CPU the mistake stays hidden.

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
# After N-1 passes every rank has seen the K and V of all ranks, and has stored only one piece at a
# time. One more pass brings each piece back to its own rank.

# %% [markdown]
# A rank has q, k and v of its own tokens, and `positions`: their places in the sequence. The tokens of
# a rank need not be consecutive, so only positions decide which query sees which key. Without a gather,
# a head's scores have (s/N)² numbers, and K and V have s/N tokens. Guess: by what factor is the peak
# memory of one of 2 ranks larger than that of one of 8 ranks?

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
# Forward first. Send k, v and `positions` together. k and v may have fewer heads than q, as in Llama.
# `lab.block_attention` handles that, and divides the scores by √d.

# %%
# Exercise 7.11: attention of this rank's queries to the keys of all ranks
def ring_forward(q, k, v, positions, group):
    """Returns (out, lse) of q (batch, heads, s/N, d); positions (s/N) are those of q, k and v."""
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
# Backward: `lab.block_backward(q, k, v, visible, out, lse, grad)` returns one block's contributions to
# dq, dk and dv, in the shapes of q, k and v. out and lse are the results of forward, over *all* keys. A
# key's gradient is a sum over the queries of all ranks. So dk and dv are sent together with their k and
# v, until they are back on their own rank.

# %%
def ring_backward(q, k, v, positions, out, lse, grad, group):
    """Returns (dq, dk, dv) of this rank's q, k and v; grad is the gradient of out."""
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
# <details><summary>Hint</summary>
#
# Take the picture above for two ranks, and write beside each box what that rank computes.
#
# Forward: start with out = 0 and lse = -inf, the attention to no key. Repeat N times: build the mask
# for these keys, compute the block's attention, merge. Pass on between two blocks. A send needs
# contiguous memory.
#
# Backward: the same rounds with two more tensors in the ring, initially zeros. In each round add the
# block's contributions to dq, which stays on the rank, and to the dk and dv that are here now. This
# takes N passes.
#
# </details>

# %% [markdown]
# The check also counts what a rank sends, and records its peak. It rejects an answer that gathers K and
# V, because this exercise is the ring. Llama 3 does gather them: see the next section. Here is your
# ring's peak on 2, 4 and 8 ranks: with all scores of a block in memory, and with `lab.block_attention`
# computing tiles of 64 queries and keys, as a fused kernel does:

# %%
lab.show_ring_memory(ring_attention)

# %% [markdown]
# **Notice:** the scores of a block fall with 1/N² and the rest with 1/N, so the peak falls faster than
# 1/N.
#
# With tiles, the scores of a block are never all in memory. What remains are pieces of K, V and their
# gradients, which fall with 1/N.

# %% [markdown]
# This ring waits for each pass. Production code overlaps the next transfer with the current block:
# compute grows as (s/N)², the transfer only as s/N. On a CPU this overlap is not visible.

# %% [markdown]
# ## All-gathered keys and values, as in Llama 3
#
# Llama 3 *all-gathers* K and V, and then computes the attention of its queries in one call
# (*[paper](https://arxiv.org/abs/2407.21783)*, section 3.3.2). torch does the same by default. The paper
# gives two reasons: one kernel call takes any mask, such as a document mask, and with grouped-query
# attention K and V are small compared with Q. You have written the collective already:
# `GatherToRegion`, whose backward sums each key's gradient over the ranks.

# %%
def gathered_attention(q, k, v, positions, group):
    """Returns the attention to the keys of all ranks, which are all-gathered along the sequence."""
    k, v = (GatherToRegion.apply(x.transpose(1, 2), group).transpose(1, 2) for x in (k, v))
    places = all_gather_sequence(positions[None], group)[0]
    return lab.causal_attention(q, k, v, positions, places)


# %% [markdown]
# ## Ulysses: exchange tokens for heads
#
# Attention heads are independent. So in **Ulysses** (*[DeepSpeed](https://arxiv.org/abs/2309.14509)*) an
# all-to-all gives each rank *all tokens of 1/N of the heads*. Ordinary attention follows. A
# second all-to-all gives each rank all heads of its tokens again. The number of query heads must be a
# multiple of N. If there are fewer key heads than ranks, each key head is sent to several ranks.

# %%
class Exchange(torch.autograd.Function):
    """Splits dimension `split` over the ranks, and joins the received pieces along `join`."""
    @staticmethod
    def forward(ctx, x, split, join, group):
        if x.shape[split] % group.size():
            raise ValueError(f"{x.shape[split]} heads are not divisible by {group.size()} ranks")
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
    """Returns the attention to all keys, computed for this rank's part of the heads."""
    if k.shape[1] < group.size():  # a rank's query heads share one key head: a copy for each rank
        k, v = (x.repeat_interleave(group.size() // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))  # (batch, heads/N, s, d)
    places = all_gather_sequence(positions[None], group)[0]
    return Exchange.apply(lab.causal_attention(q, k, v, places, places), 2, 1, group)


# %% [markdown]
# The next cell runs all three, with 8 query heads and 2 key heads. In forward and backward together,
# gathering sends K and V of N-1 other ranks, and their gradients. Ulysses sends (N-1)/N of q, k, v and
# out, twice. Guess: how many times as many bytes as gathering does Ulysses send on 4 ranks?

# %%
# A guess, for the three ways
### BEGIN SOLUTION
my_guess = 12 / 8  # d numbers of a token: (8 + 4 + 4 + 8) / 4 for a rank and pass, against 2 + 2
### END SOLUTION
labs.guess("7.11b", "bytes of Ulysses on 4 ranks, as a multiple of gathering", my_guess)

# %%
lab.show_three_ways(ring_attention, gathered_attention, ulysses_attention)

# %% [markdown]
# **Notice:** with the scores in memory, the ring's small blocks look far better than the others.
#
# Production kernels compute in tiles. With tiles the ring needs more memory than gathering on 2 and 4
# ranks, and less on 8: the complete K, V and gradients do not shrink with N. With 8 query heads and 2 key
# heads, Ulysses sends more bytes than gathering on 2 and 4 ranks, and as many on 8.

# %% [markdown]
# In general, Ulysses sends fewer bytes than gathering if N is larger than (query heads + key heads sent) /
# key heads. A ring sends the most, but overlaps a pass with a block that takes longer to compute. So the
# choice depends on heads, length and N. By these formulas, with one link of 400 Gbit/s for each GPU:

# %%
lab.show_context_parallel_choice()

# %% [markdown]
# A ring exposes no communication if its blocks are long, and 53 % or more if they are short. Gathering
# exposes 6 % with Llama 3's heads, and Ulysses would send twice the bytes. Without grouped queries gathering
# exposes 99 %; Ulysses is then better at 131,072 tokens, as long as N does not exceed the number of heads.
# For a million tokens a ring is best, because the complete K and V of a layer take gigabytes.

# %% [markdown]
# ## Load balance of causal attention
#
# A causal kernel skips the pairs whose key comes after the query. If rank 0 has the first quarter of the
# sequence, it computes nothing in rounds 1 to 3, while rank 3 computes in each round. K and V move on only
# when the slowest rank is done. Guess: how many times as long as with equal work do contiguous pieces take
# on 4 ranks?

# %%
# A guess, for exercise 7.12
### BEGIN SOLUTION
my_guess = 1.75
### END SOLUTION
labs.guess("7.12", "contiguous pieces on 4 ranks, as a multiple of equal work", my_guess)

# %% [markdown]
# ### Exercise 7.12 · Equal work in every round
#
# *Difficulty 3 of 5 · 20 minutes · target: in each round, the same number of pairs on all ranks*
#
# First the measure. In round k, rank r has the keys of rank (r - k) % N. A pair is a query and a key that
# it sees: the key's position is not larger. The ranks of a round compute at the same time. Return the
# number of pairs that are computed one after the other.

# %%
# Exercise 7.12: what the ring waits for
def critical_path(places):
    """places[rank]: the positions of that rank's tokens, a list."""
    ### BEGIN SOLUTION
    ranks, total = len(places), 0
    for passed in range(ranks):
        slowest = 0
        for rank, queries in enumerate(places):
            keys = places[(rank - passed) % ranks]
            slowest = max(slowest, sum(key <= query for query in queries for key in keys))
        total += slowest
    return total
    ### END SOLUTION

# %% [markdown]
# Now shorten it. The sequence is split into equal chunks, numbered from its beginning. `chunks` is a
# multiple of 2 · `ranks`. Each rank gets the same number of chunks.

# %%
# Exercise 7.12, continued: assign the sequence's chunks to ranks
def assign(chunks, ranks):
    """Returns, for each rank, the list of its chunks' numbers."""
    ### BEGIN SOLUTION
    pairs = [[head, chunks - 1 - head] for head in range(chunks // 2)]
    return [sum(pairs[rank::ranks], []) for rank in range(ranks)]
    ### END SOLUTION


# %%
lab.check_assign(assign, critical_path)

# %% [markdown]
# <details><summary>Hint</summary>
#
# With 4 chunks, how many chunks of keys does each chunk of queries see? Which two chunks together see as
# many as the other two?
#
# The first chunk sees the fewest keys and the last one the most: they are a pair. So are the second and
# the second to last. Give each rank complete pairs.
#
# </details>

# %%
lab.show_rounds(assign, ring_attention)

# %% [markdown]
# **Notice:** in the upper picture, rank 3 computes in every round and rank 0 in one. In the lower one,
# all bars of a round are equally high.
#
# Your `ring_attention` computed both, because its mask depends only on the positions. The picture counts
# the pairs of a causal kernel. `lab.block_attention` computes all pairs and then masks them, so its
# seconds do not show the difference.

# %%
lab.show_assignments(assign, critical_path)

# %% [markdown]
# Your `critical_path` has computed this table. Contiguous pieces approach twice the time. Round robin with two chunks for each rank approaches 1.5
# times. Round robin token by token, called "striped attention", is nearly balanced. Pairing head and tail,
# called zigzag, is exactly balanced. torch and *[Llama 3](https://arxiv.org/abs/2407.21783)* use it. They
# need it although they gather: then a rank's work is its sum over all rounds.

# %% [markdown]
# A complete model needs little more. Each rank gets its tokens, their positions for the rotary embedding,
# and their labels, which are shifted *before* the sequence is split. Here a small Llama runs on real text,
# with your attention and your chunks:

# %%
lab.show_ring_in_llama(ring_attention, assign)

# %% [markdown]
# Loss, logits and gradients equal those of one process. For the weights, context parallelism is data
# parallelism: their gradients are summed over ranks.
#
# torch has this as `context_parallel`, which replaces `F.scaled_dot_product_attention` inside a `with`
# block: with zigzag, and by default with gathered keys. `set_rotate_method("alltoall")` makes it a ring
# (*[tutorial](https://docs.pytorch.org/tutorials/unstable/context_parallel.html)*). It needs CUDA's fused
# kernels. On this machine:

# %%
lab.show_context_parallel()

# %% [markdown]
# ## A script of your own
#
# Real jobs combine several dimensions of parallelism. Matrices are sharded over a mesh's dimension
# "tensor", inside a node, and FSDP shards the result over its dimension "data". Both use DTensors, so call
# `parallelize_module` first and `fully_shard` after it.

# %% [markdown]
# | In your file | is |
# |:--|:--|
# | `mesh["tensor"]`, `mesh["data"]` | this rank's submesh of that dimension; `size()`, `get_local_rank()` |
# | `parallelize_module(model, mesh, {"model.layers.*.…": style})` | shards each named module |
# | `ColwiseParallel(output_layouts=Replicate())` | gathers its output |
# | `DistributedSampler(samples, replicas, number, seed=…)` | samples of one replica |
#
# On GPUs, `torch.distributed.tensor.experimental.context_parallel(mesh, buffers=…)` shards the sequence
# around forward and backward; torch has no CPU version.

# %% [markdown]
# ### Exercise 7.28 · `tp.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: an equal part of every matrix on each rank; the saved model equals
# that of one process, for one replica of two ranks and for two*
#
# The next cell writes the file. Fill in its two gaps. The script has no sequence parallelism, and its logits
# are complete on each rank, so the training loop is that of `ddp.py`.

# %%
lab.write_script("tp.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: a layer's seven projections, the embedding and the head. Without sequence parallelism norms need
# no style. An embedding is split by rows, and its input is replicated.
#
# Second gap: into how many parts are the samples split, and which part is this rank's? All ranks of one replica
# get the same part.
#
# </details>

# %%
lab.check_tp("tp.py")

# %%
lab.torchrun("tp.py", "--tensor", 2, ranks=4)

# %% [markdown]
# Saving needs complete tensors. torch warns of what this costs for a matrix that is sharded in both dimensions:
# two all-gathers, one after the other.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | gradients before a sharded layer are too small | f is missing |
# | output off by t − 1 biases | every rank adds the bias |
# | gradients t times too large | an all-reduce that sums in backward too |
# | replicas of a norm's weight diverge | partial gradients, not summed |
# | heads of different ranks get one dropout mask | one seed on all ranks |
# | replicated hidden states differ | different seeds where ranks must agree |
# | a peak of b·s·v | gathered logits |

# %% [markdown]
# ## I can …
#
# - write f and g, and say where a layer needs which of them
# - shard grouped-query attention, an MLP and a vocabulary over ranks
# - count a layer's all-reduces and their bytes
# - say what sequence parallelism saves
# - say which random numbers must be equal on all ranks, and which must differ
# - pass keys and values around a ring with balanced work, and say when gathering or Ulysses is better
# - write a job that combines tensor parallelism with FSDP

# %% [markdown]
# ## What to read
#
# - Shoeybi et al., *Megatron-LM*, 2019, section 3: why is the first matrix of the MLP split by columns?
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, section
#   4.2: which activations does sequence parallelism shard?
# - Liu, Zaharia, Abbeel, *Ring Attention with Blockwise Transformers*, 2023, section 3: how long must
#   a block be to hide its messages?
# - torch's tutorial on tensor parallelism: where does it use `PrepareModuleInput`, and why?

# %% [markdown]
# ## What comes next
#
# In **07b** the layers are partitioned: each rank has some of them.
#
# Muon on sharded matrices (exercise 7.13) has a notebook of its own, which is optional:
# [07d](07d_sharded_muon.ipynb).
