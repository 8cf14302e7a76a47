# %% [markdown]
# # 07a · Tensor parallel
#
# | | |
# |:--|:--|
# | **Time** | 150 minutes; 30 for the optional exercise |
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
# - pass keys and values around a ring, so that no rank ever holds the whole sequence.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import labs
import labs.tensor_parallel as lab

labs.warm_up()

# %% [markdown]
# ## PART A: linear layers, attention, a whole Llama

# %% [markdown]
# ## PART B: the vocabulary, and the norm of the gradients

# %% [markdown]
# ## PART C: the sequence, and torch's own

# %% [markdown]
# ## A sequence longer than one rank can hold
#
# Llama 3 was trained on sequences of 131,072 tokens. Without checkpointing a layer keeps 34·s·b·h
# bytes of activations in 16-bit precision (notebook 01), and scores in addition, 2·a·b·s² bytes for a
# heads, if a kernel keeps them. For the 8B model, with 32 layers, h = 4,096, a = 32 and one sequence:

# %%
s, h, layers, heads = 131_072, 4096, 32, 32
GB = {"all activations": 34 * s * h * layers, "scores of one layer": 2 * heads * s**2,
      "activations on each of 16 ranks": 34 * s * h * layers / 16}
{name: round(nbytes / 1e9, 1) for name, nbytes in GB.items()}

# %% [markdown]
# No GPU holds 584 GB. Tensor parallelism divides them by 8 at most, because it ends at the host. In
# **context parallelism** each rank has s/N tokens of the sequence in *every* layer: norms, linear
# layers and the MLP need no other token. Attention does: a query needs the keys and values of all
# tokens before its own. Llama 3 divided each such sequence among 16 ranks.

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
# ## Keys and values go round
#
# In **ring attention** K and V travel, and the queries stay. Each rank passes what it has to the next
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
# is gathered, a head's scores have (s/N)² numbers, and K and V s/N tokens. Guess: how many times as
# much does a rank of 2 hold at its peak as a rank of 8?

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
# Forward first. k, v and `positions` travel together. k and v may have fewer heads than q, as in
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
# to dq, dk and dv; out and lse are those that forward returned, of *all* keys. A key's gradient is a
# sum over the queries of all ranks, so dk and dv travel with the k and v that they belong to, until
# they are home.

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
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad):
        return *ring_backward(*ctx.saved_tensors, grad, ctx.group), None, None


ring_attention = RingAttention.apply

# %%
lab.check_ring_attention(ring_attention)

# %% [markdown]
# The check also counts what a rank sends, and records its peak. To gather K and V first gives the same
# numbers and is rejected: a rank then holds the whole sequence. Both are drawn here for one sequence,
# on 2, 4 and 8 ranks:

# %%
lab.show_ring_memory(ring_attention)

# %% [markdown]
# **Notice:** scores fall with 1/N² and the rest with 1/N, so the ring's peak falls faster than 1/N.
# With K and V gathered a rank's scores fall with 1/N only, and K and V not at all. A fused kernel
# keeps no scores; then the pieces remain, and with a ring they fall with 1/N.

# %% [markdown]
# This ring waits for each pass. In production the next pass travels *while* a block is computed: it
# takes longer to compute (s/N)² pairs than to send s/N tokens if s/N is large enough. On a CPU no
# such overlap shows.

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
# tail, called zigzag, is exactly even, and is what torch and Llama 3 do.

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
# torch has all this as `context_parallel`, which replaces `F.scaled_dot_product_attention` inside a
# block of code, by default with the keys gathered (`set_rotate_method("alltoall")` passes them on) and
# with the zigzag. It needs CUDA's fused kernels. On this machine:

# %%
lab.show_context_parallel()

# %% [markdown]
# ## Optional: Muon under sharding
#
# AdamW treats every number by itself, so ZeRO may cut anywhere. **Muon** does not: it orthogonalises
# the momentum of each weight *matrix* by **Newton-Schulz** iterations, products of the whole matrix.
# ZeRO-1 lays all matrices end to end and cuts at multiples of Ψ/N. What if a rank orthogonalises what
# it has? Measured on a Llama of 3 layers, 4 ranks:

# %%
lab.show_sharded_muon()

# %% [markdown]
# **Notice:** matrices that one rank has whole are right, so training goes on and looks healthy. Those
# on a boundary get another update. The right-hand side happened in DeepSpeed (issue 7807): after its
# reduce-scatter the rest of the matrix was still each rank's own gradient. And its ZeRO-3 orthogonalised
# once for each micro-batch (issue 8443); the sum of these updates is not the update of the sum.

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
# each rank the mean over ranks of its shard, by `lab.reduce_scatter_single(output, input, group=group)`.
# Then momentum ← 0.95 · momentum + that mean, in place. `lab.newton_schulz(matrix)` orthogonalises. The
# result is this rank's shard of the update, with zeros in the padding.

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
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | | |

# %% [markdown]
# ## I can …
#
# - [ ] …

# %% [markdown]
# ## What to read
#
# - …

# %% [markdown]
# ## What comes next
#
# In **07b** the layers themselves are divided: each rank has some of them.
