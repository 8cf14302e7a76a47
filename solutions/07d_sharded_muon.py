# %% [markdown]
# # 07d · Optional: Muon on sharded matrices
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 35 minutes |
# | **Needs** | any machine with 2 cores; no GPU |
#
# AdamW's update of an element needs that element alone, so ZeRO may split parameters anywhere. Muon's
# update of an element needs its complete weight matrix. Here you compute it where ranks have pieces of
# matrices. No later notebook needs this one.
#
# Read [03](03_zero_stages.ipynb) before it, and [07a](07a_tensor_parallel.ipynb) for `batch_isend_irecv`.

# %% [markdown]
# ## You will be able to
#
# - say which optimizers ZeRO-1 may shard at any element, and which it may not;
# - gather a matrix of which several ranks have a piece, without communicating any other;
# - compute Muon's update of sharded matrices, equal to that of unsharded ones.

# %%
import torch
import torch.distributed as dist

import labs
import labs.sharded_muon as lab

labs.warm_up()

# %% [markdown]
# ## Muon's update of a matrix
#
# **Muon** has one momentum, 4 bytes for each parameter, where AdamW has two moments, 8 bytes. It
# orthogonalises the momentum of each weight *matrix*: the singular vectors stay, and all singular values
# come near 1. **Newton-Schulz** iterations do that with matrix products only, which are fast on GPUs.
# `lab.newton_schulz(matrix)` has five of them.

# %%
torch.manual_seed(0)
momentum = torch.randn(4, 6)
for title, matrix in (("momentum", momentum), ("update", lab.newton_schulz(momentum))):
    print(f"{title:9} singular values", *(f"{value:.2f}" for value in torch.linalg.svdvals(matrix)))

# %% [markdown]
# Two ranks have two rows each. If each orthogonalises its own rows, are these the rows of the update?

# %%
alone = torch.cat([lab.newton_schulz(rows) for rows in momentum.chunk(2)])
update = lab.newton_schulz(momentum)
print(f"off by {(alone - update).norm() / update.norm():.0%} of the update's norm")

# %% [markdown]
# They are not, because the singular vectors belong to the complete matrix.

# %% [markdown]
# ## Matrices on a boundary between shards
#
# ZeRO-1 concatenates all matrices and splits them at multiples of Ψ/N (Ψ parameters, N ranks). A
# boundary between two shards is usually inside a matrix. How many matrices of a model have one, and how
# wrong is their update if each rank orthogonalises only its piece? The next cell computes it from the
# gradients of a Llama with 3 layers, sharded for 4 ranks:

# %%
lab.show_sharded_muon()

# %% [markdown]
# **Notice:** the update of a matrix on one rank is right. That of a matrix on a boundary is 30 % off or
# more.
#
# The right-hand side happened in DeepSpeed
# (*[issue 7807](https://github.com/deepspeedai/DeepSpeed/issues/7807)*): after its reduce-scatter the rest of
# the matrix was still each rank's own gradient. DeepSpeed has refused such shards since June 2026 (PR
# 8090), and has gathered the matrix since July (PR 8141).

# %% [markdown]
# Its ZeRO-3 orthogonalised after each micro-batch (issue 8443). But the sum of these updates is not the
# update of the sum.

# %% [markdown]
# ## Gradients are reduced once
#
# `reduce_scatter_single` sums a flat gradient over ranks and leaves each rank its shard of the sum. A
# rank divides by N before it, so that the sum is the mean. Here rank 0 has the gradient (0, 1, 2, 3), and
# rank 1 three times that.

# %%
def mean_of_gradients():
    gradient = torch.arange(4.0, device=labs.device()) * (1 + 2 * dist.get_rank())
    shard = torch.empty(2, device=labs.device())
    dist.reduce_scatter_single(shard, gradient / dist.get_world_size())
    return shard.tolist()

print("shards of the mean:", *labs.launch(mean_of_gradients, ranks=2))

# %% [markdown]
# `lab.pieces_of(shapes, ranks)` returns, for each matrix, a dict from rank to piece. A piece has two slices:
# `in_matrix`, of the flattened matrix, and `in_shard`, of the rank's flat shard.

# %%
for shape, pieces in zip([(2, 3), (4, 2)], lab.pieces_of([(2, 3), (4, 2)], ranks=2)):
    print(shape, {rank: (piece.in_matrix, piece.in_shard) for rank, piece in pieces.items()})

# %% [markdown]
# ### Exercise 7.13 · Muon's update of a sharded matrix
#
# *Difficulty 4 of 5 · 30 minutes · target: the update of unsharded matrices; gradients are reduced once, and
# only matrices on a boundary are communicated*
#
# First the complete matrix: each rank that has a piece of it sends its piece to the others.

# %%
# Exercise 7.13: Muon's update of matrices that are sharded over ranks
def gather_matrix(shard, pieces, shape, group):
    """Returns the full matrix (rows, columns): this rank's piece is in `shard`."""
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
# `gradients` has one flat gradient for each micro-batch, N times as long as a shard. Sum them, and reduce
# the sum as above, with `group=group`. Update momentum ← 0.95 · momentum + mean, in place. Then
# orthogonalise the matrices of which this rank has a piece. Return this rank's shard of the update, with
# zeros in the padding.

# %%
def muon_update(gradients, momentum, shapes, group):
    """Returns this rank's shard of the update; momentum, a shard too, is updated in place."""
    ### BEGIN SOLUTION
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mean, update = torch.empty_like(momentum), torch.zeros_like(momentum)
    dist.reduce_scatter_single(mean, sum(gradients) / ranks, group=group)
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
# Only ranks that own a piece of a matrix compute its update. Each keeps its own piece of the result.
#
# `gather_matrix`: allocate the full flat matrix, and copy this rank's piece into its place. With every other
# rank in `pieces`: send this rank's piece, and receive theirs into its place. All of it is one batch, which
# may be empty.
#
# `muon_update`: reduce the gradients as the text above says. Then, for each matrix of which this rank has a
# piece: gather it from the *momentum*, orthogonalise it, and copy this rank's piece of the result.
#
# </details>

# %% [markdown]
# At most N-1 boundaries split a matrix, whatever the model's size, so few bytes are sent. Every rank with
# a piece of a matrix computes the same update. The alternative is to assign complete matrices to ranks:
# nothing is gathered then, but the shards have different lengths.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | a few matrices are off by 30 % or more | each rank orthogonalised its own piece |
# | ranks with a piece of one matrix disagree | the rest of the matrix was not reduced |
# | the update depends on the number of micro-batches | one update for each, not one for their sum |
# | each rank sends all of its momentum | matrices that are complete on a rank were gathered, too |

# %% [markdown]
# ## I can …
#
# - say why an elementwise optimizer may be sharded anywhere, and Muon may not
# - name the matrices that must be communicated, and bound their number
# - say when gradients are reduced, and when the momentum is gathered

# %% [markdown]
# ## What to read
#
# - Jordan et al., *[Muon](https://kellerjordan.github.io/posts/muon/)*, 2024: which parameters get AdamW
#   instead?
# - Liu et al., *[Muon is Scalable for LLM Training](https://arxiv.org/abs/2502.16982)*, 2025, section
#   2.3: why does it communicate at most 1.25 times as many bytes as AdamW under ZeRO-1?
# - Bernstein and Newhouse, *[Old Optimizer, New Norm](https://arxiv.org/abs/2409.20325)*, 2024: in which
#   norm is the orthogonalised gradient the direction of steepest descent?

# %% [markdown]
# ## What comes next
#
# Nothing needs this notebook. With thousands of GPUs a failure occurs every few hours: **08** kills ranks,
# and training continues.
