# %% [markdown]
# # 09 · Mixture of experts
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 180 minutes in two sittings (95 + 85) |
# | **Needs** | any machine with 2 cores; no GPU |
#
# In a mixture of experts a token uses only some of a layer's parameters. Here you write such a layer,
# divide its experts over ranks, and find out which gradients have to be averaged over which ranks.
# Then you balance the experts, combine them with FSDP, and compute what training takes.

# %% [markdown]
# *On a CPU* the collectives, their bytes and the memory of each rank are those of a GPU node. The
# seconds are not. Where one rank waits for another, each token has a stated duration.

# %% [markdown]
# ## You will be able to
#
# - write the router, dispatch and combine of an expert layer;
# - divide experts over ranks, with two all-to-alls of uneven sizes in each direction;
# - say which gradient is averaged over which ranks, and recognise the published faults.

# %%
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import Parameter

import labs
import labs.mixture_of_experts as lab

labs.warm_up()

# %% [markdown]
# ## Parameters that a token does not use
#
# DeepSeek-V3 has 671 billion parameters. A dense model of that size needs 6 · 671 billion FLOPs for
# each token. In DeepSeek-V3 most layers have 256 MLPs instead of one, the **experts**. A small linear layer, the
# **router**, chooses 8 of them for each token. One more, the **shared expert**, is used by all tokens.
#
# The models below have shapes and no memory, so they can be counted exactly. These are the parameters of one layer:

# %%
model = lab.on_meta("DeepSeek-V3")
{name: list(p.shape) for name, p in model.model.layers[5].mlp.named_parameters()}

# %% [markdown]
# `gate_up_proj` has the matrices of all 256 experts; its first dimension is the expert. Guess: what
# percentage of DeepSeek-V3's parameters does one token use?

# %%
# A guess, for exercise 9.1
### BEGIN SOLUTION
my_guess = 5
### END SOLUTION
labs.guess("9.1", "% of DeepSeek-V3's parameters that a token uses", my_guess)

# %% [markdown]
# ### Exercise 9.1 · Total and active parameters
#
# *Difficulty 1 of 5 · 10 minutes · target: exact for Mixtral-8x7B, Qwen3-30B-A3B and DeepSeek-V3*
#
# `count_parameters(model, experts, k)` returns two numbers: all parameters, and the **active** ones,
# which a token uses. It uses k of the `experts` in each expert layer, and everything else. Parameters of the chosen experts
# have `.experts.` in their names, those of a shared expert `.shared_experts.`.

# %%
# Exercise 9.1: all parameters, and those that a token uses
def count_parameters(model, experts, k):
    ### BEGIN SOLUTION
    total = active = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        total += count
        active += count * k // experts if ".experts." in name else count
    return total, active
    ### END SOLUTION


# %%
lab.check_count_parameters(count_parameters)

# %%
lab.show_parameters(count_parameters)

# %% [markdown]
# **Notice:** DeepSeek-V3 computes for a token about as much as a dense model of 38 billion parameters. But all
# 671 billion need memory, with their gradients and optimizer states.

# %% [markdown]
# ## Router, dispatch and combine
#
# For each token the router computes one **logit** for each expert. Softmax makes probabilities of the logits, and
# the k largest are chosen. Their probabilities, divided by their sum, are the weights with which the outputs of the k
# experts are added:
#
# y = Σ wᵢ · expertᵢ(x), over the k chosen experts i.
#
# A loop over the experts with a mask for each is correct, and slow: it reads all tokens once for each expert. So
# tokens are *sorted* by expert first. Each expert then multiplies one contiguous block.

# %%
class Experts(nn.Module):
    """gate_up (experts, 2·ffn, hidden) and down (experts, hidden, ffn) of gated MLPs."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = Parameter(gate_up), Parameter(down)

    def forward(self, copies, counts):
        """copies (n, hidden), sorted by expert; counts: how many belong to each, a list."""
        outputs = []
        for part, gate_up, down in zip(copies.split(counts), self.gate_up, self.down):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


# %% [markdown]
# Each token is copied k times, once for each of its experts. **Dispatch** sorts these copies by expert, **combine**
# brings the outputs back into the order of the tokens and adds them. For three tokens, two experts each:

# %%
chosen = torch.tensor([[2, 0], [1, 2], [0, 2]])
order = chosen.flatten().argsort(stable=True)
{"experts of the copies": chosen.flatten().tolist(), "order": order.tolist(),
 "their tokens": (order // 2).tolist(), "copies for each expert": chosen.flatten().bincount().tolist()}

# %% [markdown]
# Guess: 1,024 tokens, 8 experts, 2 for each token, and a router that has not been trained. How many copies
# does the expert with the most of them get? The mean is 256.

# %%
# A guess, for exercise 9.2
### BEGIN SOLUTION
my_guess = 350
### END SOLUTION
labs.guess("9.2", "copies for the expert with the most of them, of 2,048", my_guess)

# %% [markdown]
# ### Exercise 9.2 · Route, dispatch, combine
#
# *Difficulty 2 of 5 · 20 minutes · target: outputs and gradients of the loop over experts, for any k, also where
# an expert gets no token*
#
# `route` computes softmax in fp32; its weights have the dtype of the logits. `dispatch` returns the copies, sorted by expert
# and then by token; a tensor with the count for each expert; and `order`, with which `combine` restores the
# order of the tokens.

# %%
# Exercise 9.2: who goes to which expert, and back
def route(logits, k):
    """logits (tokens, experts) -> weights (tokens, k), chosen experts (tokens, k)."""
    ### BEGIN SOLUTION
    probabilities = logits.softmax(-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(k)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen
    ### END SOLUTION


def dispatch(tokens, chosen, experts):
    """tokens (tokens, hidden) -> copies (tokens · k, hidden), counts (experts,), order."""
    ### BEGIN SOLUTION
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=experts)
    return tokens[order // chosen.shape[1]], counts, order
    ### END SOLUTION


def combine(outputs, order, weights):
    """outputs (tokens · k, hidden), sorted by expert -> (tokens, hidden)."""
    ### BEGIN SOLUTION
    by_token = outputs[order.argsort()].unflatten(0, weights.shape)  # (tokens, k, hidden)
    return (weights[..., None] * by_token).sum(1)
    ### END SOLUTION


# %%
lab.check_expert_layer(route, dispatch, combine)

# %% [markdown]
# With these three functions, the layer of one rank:

# %%
class ExpertLayer(nn.Module):
    """Replaces `layer`, which loops over all experts; the parameters are the same."""

    def __init__(self, layer):
        super().__init__()
        self.k, self.router, self.shared = layer.k, layer.router, layer.shared
        self.experts = Experts(layer.experts.gate_up, layer.experts.down)

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (tokens, hidden)
        weights, chosen = route(self.router(tokens), self.k)
        copies, counts, order = dispatch(tokens, chosen, self.router.out_features)
        outputs = self.experts(copies, counts.tolist())
        result = combine(outputs, order, weights).view_as(x)
        return result if self.shared is None else result + self.shared(x)


# %%
lab.show_dispatch(route, dispatch)

# %% [markdown]
# **Notice:** the router was drawn at random, and its experts get very different numbers of copies. One expert per GPU
# would make seven of them wait for the eighth. "Balance" below comes back to this.

# %% [markdown]
# ## Experts on several ranks
#
# A layer of DeepSeek-V3 has 11.3 billion parameters in its experts, 22.5 GB in bf16. FSDP gathers a
# complete layer before it is used, on every rank. Under **expert parallelism** each of N ranks keeps 1/N of the experts
# and *tokens* are sent instead: each copy to the rank that has its expert, and the output back.
#
# That is one **all-to-all** each way: every rank sends every other rank a part of its own. All else stays data
# parallel: each rank has its own samples, and complete attention, router and shared expert.

# %% [markdown]
# `dist.all_to_all_single(output, input, receive, send)` sends the first `send[0]` rows of `input` to rank 0, the
# next `send[1]` rows to rank 1, and so on. `receive[i]` says how many rows come from rank i. No rank
# knows that before: so the counts are sent first, in an all-to-all of equal parts.

# %%
def counts_then_rows():
    rank = dist.get_rank()
    send = [[1, 3], [2, 0]][rank]  # how many rows this rank sends to ranks 0 and 1
    receive = torch.empty(2, dtype=torch.int64)
    dist.all_to_all_single(receive, torch.tensor(send))
    rows = torch.arange(sum(send)) + 10 * rank
    arrived = torch.empty(int(receive.sum()), dtype=torch.int64)
    dist.all_to_all_single(arrived, rows, receive.tolist(), send)
    return {"receives": receive.tolist(), "rows": arrived.tolist()}


labs.launch(counts_then_rows, ranks=2, quiet=True)

# %% [markdown]
# Let b·s be the tokens of a rank and h the hidden size, with 4-byte numbers. Guess: with k = 2, how many times b·s·h·4 bytes does one of 4 ranks
# send to other ranks in one layer, forward and backward together, if tokens spread evenly?

# %%
# A guess, for exercise 9.3
### BEGIN SOLUTION
my_guess = 6
### END SOLUTION
labs.guess("9.3", "times b·s·h·4 bytes sent in a layer, forward and backward", my_guess)

# %% [markdown]
# ### Exercise 9.3 · Expert parallelism
#
# *Difficulty 4 of 5 · 35 minutes · target: outputs and gradients of the complete layer on 2, 3 and 4 ranks; 1/N of the
# experts on a rank; four all-to-alls of rows a layer*
#
# `AllToAll` sends rows forward, and in backward their gradients the same way back. Rank r keeps the r-th of N equal
# parts of the experts, in memory of its own.

# %%
# Exercise 9.3: rows to other ranks, and their gradients back
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, receive, send, group):
        ### BEGIN SOLUTION
        ctx.splits = receive, send, group
        arrived = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
        return arrived
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        receive, send, group = ctx.splits
        back = gradient.new_empty(sum(send), *gradient.shape[1:])
        dist.all_to_all_single(back, gradient.contiguous(), send, receive, group=group)
        return back, None, None, None
        ### END SOLUTION


# %% [markdown]
# The copies that arrive are sorted by the rank that sent them, and for each rank by expert. But `Experts` needs all copies of
# an expert in one block. So they are sorted once more, and the outputs are put back into the order of arrival before they are
# returned. `theirs[i, j]` below is the number of copies that rank i sends for the j-th of this rank's experts.

# %%
# Exercise 9.3, continued: this rank's experts compute what all ranks send
class ExpertParallelLayer(nn.Module):
    def __init__(self, layer, group):
        super().__init__()
        self.k, self.router, self.shared, self.group = layer.k, layer.router, layer.shared, group
        ### BEGIN SOLUTION
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        gate_up, down = layer.experts.gate_up.detach(), layer.experts.down.detach()
        self.experts = Experts(gate_up.chunk(ranks)[rank].clone(), down.chunk(ranks)[rank].clone())
        ### END SOLUTION

    def forward(self, x):
        tokens, experts = x.flatten(0, -2), self.router.out_features
        weights, chosen = route(self.router(tokens), self.k)
        copies, counts, order = dispatch(tokens, chosen, experts)
        outputs = self.compute(copies, counts)
        result = combine(outputs, order, weights).view_as(x)
        return result if self.shared is None else result + self.shared(x)

    def compute(self, copies, counts):
        """Outputs of the experts, wherever they are, in the order of `copies`."""
        ranks = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        counts, theirs = counts.view(ranks, -1), theirs.view(ranks, -1)
        ### BEGIN SOLUTION
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        arrived = AllToAll.apply(copies, receive, send, self.group)
        expert = torch.arange(theirs.numel(), device=copies.device) % theirs.shape[1]
        order = expert.repeat_interleave(theirs.flatten()).argsort(stable=True)
        outputs = self.experts(arrived[order], theirs.sum(0).tolist())
        return AllToAll.apply(outputs[order.argsort()], send, receive, self.group)
        ### END SOLUTION


# %%
lab.check_expert_parallel(AllToAll, ExpertParallelLayer)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `copies` is sorted by expert, so also by the rank that has the expert: it can be sent as it is. Row r of `counts` has the
# counts for rank r's experts.
#
# For the second sort: write down, for each row that arrives, the number of its expert, 0, 1, … on this rank. These numbers repeat
# for each rank, as often as `theirs` says. `argsort(stable=True)` of them is the order, and its `argsort()` the way back.
#
# Splits are lists of ints. A rank may send or receive no row, and takes part all the same.
#
# </details>

# %%
lab.show_bytes(ExpertParallelLayer)

# %% [markdown]
# **Notice:** each of the four all-to-alls sends about k·b·s·h·(N − 1)/N elements, because of N equal parts a rank keeps
# one. The counts are a few bytes, but a rank must wait for them: without them it cannot allocate the output.

# %% [markdown]
# ## Gradients of experts and of the rest
#
# N ranks train on N parts of a batch. Each rank's loss is the mean over its own tokens, and the loss of the batch is the mean over the N ranks. Router,
# attention and shared expert are replicated on all ranks, so DDP's rule holds: average over all N.
#
# An expert is different. With N = 4 ranks and groups of EP = 2 ranks that divide the experts, each expert is on two ranks, its **replicas**. In backward a replica gets the
# gradients of its tokens from *both* ranks of its group: they are summed there already.

# %%
def groups_of_ranks():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    return {"divides its experts with": dist.get_process_group_ranks(mesh["expert"].get_group()),
            "has the same experts as": dist.get_process_group_ranks(mesh["replicate"].get_group())}


labs.launch(groups_of_ranks, ranks=4, quiet=True)

# %% [markdown]
# Guess: if each expert's gradient is averaged over its replicas, as DDP would do, how many times too large is it, with EP = 2?

# %%
# A guess, for exercise 9.4
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("9.4", "times too large, averaged over the replicas", my_guess)

# %% [markdown]
# ### Exercise 9.4 · Gradients to average
#
# *Difficulty 3 of 5 · 15 minutes · target: equal to one process for 5 steps with SGD and AdamW, for EP × replicas of 2 × 1, 1 × 2,
# 2 × 2 and 4 × 1*
#
# `average_gradients(model, replicas)` changes all gradients in place. `replicas` is the group of the ranks that have the
# same experts as this one. An expert to which no rank sent a token has a gradient of zeros. Frozen parameters have none.

# %%
# Exercise 9.4: the mean over all ranks' losses, for every parameter
def average_gradients(model, replicas):
    ### BEGIN SOLUTION
    ranks = dist.get_world_size()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            group = replicas if ".experts." in name else dist.group.WORLD
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= ranks
    ### END SOLUTION


# %% [markdown]
# The strategy calls it before each step of the optimizer, so it also works where several micro-batches accumulate:

# %%
def expert_parallel(model, optimizer_class, expert=2, **settings):
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // expert, expert), mesh_dim_names=("replicate", "expert"))
    for block in model.layers:
        block.mlp = ExpertParallelLayer(block.mlp, mesh["expert"].get_group())
    replicas = mesh["replicate"].get_group()
    optimizer = optimizer_class(model.parameters(), **settings)
    optimizer.register_step_pre_hook(lambda *_: average_gradients(model, replicas))
    return model, optimizer


# %%
lab.check_average_gradients(average_gradients, expert_parallel)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write the gradient of the batch's loss as a sum over ranks: 1/N times the sum of what each rank's loss gives. For a replicated
# parameter each rank has one term of the sum. For an expert, how many terms are in its `.grad` already after backward? The
# replicas have the others. The factor in front of the sum is the same for both.
#
# </details>

# %% [markdown]
# ## Find the fault
#
# These faults were all published, and none of them stops a run. AdamW even hides a constant factor, because it divides each gradient by its own size. So the loss curve looks right.
#
# | name | what happens | seen in |
# |:--|:--|:--|
# | `experts_doubled` | experts averaged over their replicas only | [pytorch 160285](https://github.com/pytorch/pytorch/issues/160285) |
# | `summed_each_time` | summed again after each micro-batch | [Megatron-LM 6660](https://github.com/NVIDIA/Megatron-LM/issues/6660) |
# | `router_partial` | each rank keeps its own router gradient | [transformers 48205](https://github.com/huggingface/transformers/pull/48205) |
# | `weights_detached` | the router gets no gradient through the weights | |
# | `shared_twice` | the shared expert is divided by N twice | |

# %%
lab.show_adamw_hides_it()

# %% [markdown]
# **Notice:** under AdamW the two losses cannot be told apart. Under SGD the doubled gradients show at once. So compare *gradients*
# with those of one process, before an optimizer uses them, for one micro-batch and for several.

# %% [markdown]
# ### Exercise 9.5 · Which fault is it?
#
# *Difficulty 2 of 5 · 12 minutes · target: each fault named, on other models and numbers of ranks too; None where there is none*
#
# `one` and `three` describe rank 0's gradients after one and after three micro-batches:
# `one["router"]` is a pair: the norm divided by that of one process, and the cosine between the two. The kinds are
# `experts`, `router`, `shared` and `rest`. Rounding changes both by less than 0.001. Here are the runs A to E:

# %%
lab.show_gradients()

# %%
# Exercise 9.5: the name of the fault
def name_fault(one, three):
    ### BEGIN SOLUTION
    def is_right(found, kind):
        ratio, cosine = found[kind]
        return abs(ratio - 1) < 0.01 and cosine > 0.99

    if one["router"][0] < 0.01:
        return "weights_detached"
    for kind, fault in (("router", "router_partial"), ("experts", "experts_doubled"),
                        ("shared", "shared_twice")):
        if not is_right(one, kind):
            return fault
    return None if is_right(three, "experts") else "summed_each_time"
    ### END SOLUTION


# %%
lab.check_name_fault(name_fault)

# %% [markdown]
# ## Part 2: balance, FSDP and size
#
# | | |
# |:--|:--|
# | **Core** | 9.6, 9.7, 9.8, 9.9, 9.10 |
# | **Optional** | 9.11 to 9.14 |
# | **In a new kernel** | run the cells of the imports, of exercises 9.2 and 9.3, and of `Experts` |
#
# You will be able to:
#
# - balance experts by a loss or by a bias, and say what each does to a rank's time;
# - shard experts and the rest over different ranks with FSDP;
# - say when tokens are cheaper to send than parameters.

# %% [markdown]
# ## Balance
#
# All ranks wait for the one with the most copies, twice in each layer. Here an expert takes 20 µs for a copy, and the router has
# not been trained. Guess: by what factor is the step slower than with equal counts, on 4 ranks?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 1.5
### END SOLUTION
labs.guess("9.6b", "times slower than with equal counts", my_guess)

# %%
lab.show_slowest_rank(ExpertParallelLayer)

# %% [markdown]
# **Notice:** the factor is the largest count divided by the mean, whatever the other ranks do. Training makes it worse: an
# expert that gets more tokens learns more, so the router prefers it. Two remedies are in use.
#
# An **auxiliary loss** *([Switch Transformer](https://arxiv.org/abs/2101.03961), section 2.2)*: E · Σ fᵢ · Pᵢ, summed over
# the E experts. fᵢ is expert i's share of all copies, Pᵢ its mean probability. Equal shares give 1. Only P has a gradient.

# %% [markdown]
# **Without a loss** *([DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 2.1.2)*: each expert has a bias. It is added to the
# probabilities when the k experts are chosen, and only then: the weights come from the probabilities alone. No gradient
# touches the bias. After each step it grows by a fixed `speed` for each expert with fewer copies than the mean, and
# shrinks by it for each with more.

# %% [markdown]
# ### Exercise 9.6 · Two ways to balance
#
# *Difficulty 2 of 5 · 20 minutes · target: values and gradients of the papers' formulas, for any k*
#
# All tensors are of one micro-batch. `route_with_bias` returns weights and chosen experts as `route` does. `new_bias` returns
# another tensor and keeps the old one.

# %%
# Exercise 9.6: by a loss, and by a bias
def auxiliary_loss(logits, chosen):
    """logits (tokens, experts), chosen (tokens, k) -> E · Σ f · P, which has a gradient."""
    ### BEGIN SOLUTION
    experts = logits.shape[1]
    shares = chosen.flatten().bincount(minlength=experts) / chosen.numel()
    return experts * (shares * logits.softmax(-1, dtype=torch.float32).mean(0)).sum()
    ### END SOLUTION


def route_with_bias(logits, bias, k):
    ### BEGIN SOLUTION
    probabilities = logits.softmax(-1, dtype=torch.float32)
    chosen = (probabilities + bias).topk(k).indices
    weights = probabilities.gather(-1, chosen)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen
    ### END SOLUTION


def new_bias(bias, counts, speed):
    ### BEGIN SOLUTION
    counts = counts.float()
    return bias + speed * torch.sign(counts.mean() - counts)
    ### END SOLUTION


# %%
lab.check_balance(auxiliary_loss, route_with_bias, new_bias)

# %%
lab.show_balance(auxiliary_loss, route_with_bias, new_bias)

# %% [markdown]
# **Notice:** without either, the largest count stays far above the mean. Both remedies bring it down. The bias has no gradient that
# competes with the language model's loss.

# %% [markdown]
# The auxiliary loss is a product of two means. So its value for a batch is not the mean of its values for
# the batch's parts. Here all tokens of the first micro-batch choose expert 0, all of the second expert 1:

# %%
first, second = torch.tensor([[4.0, 0.0]] * 8), torch.tensor([[0.0, 4.0]] * 8)
try:
    parts = [auxiliary_loss(x, x.topk(1).indices).item() for x in (first, second)]
    whole = torch.cat([first, second])
    print("mean of two micro-batches:", sum(parts) / 2)
    print("the batch of both:", auxiliary_loss(whole, whole.topk(1).indices).item())
except NotImplementedError:
    print("exercise 9.6 first")

# %% [markdown]
# **Notice:** the batch is balanced, and each micro-batch is not. With accumulation, in a pipeline, or on several ranks, the usual
# code computes the loss of each micro-batch, and forces each sequence to use all experts alike. Summing the *counts* over ranks and
# micro-batches first gives experts room to specialise *([Qiu et al.](https://arxiv.org/abs/2501.11873))*.

# %% [markdown]
# ## Capacity
#
# Uneven sizes are slow on some hardware, and an expert that gets all copies needs memory for all. With a **capacity** c each expert
# takes at most c copies, the first in the order of the tokens, and drops the others. A token whose copies are all dropped has
# only its residual connection. The capacity is usually given as a factor: c = ⌈factor · tokens · k / E⌉.

# %% [markdown]
# ### Exercise 9.7 · Dropped tokens
#
# *Difficulty 2 of 5 · 12 minutes · target: exactly the first c copies of each expert, for any k*
#
# `within_capacity` returns a tensor of bools, (tokens, k): which copies are kept. A token comes before all later tokens, and its first choice before its second.

# %%
# Exercise 9.7: which copies an expert takes
def within_capacity(chosen, experts, capacity):
    """chosen (tokens, k) -> bool (tokens, k)."""
    ### BEGIN SOLUTION
    one_hot = F.one_hot(chosen.flatten(), experts)  # (tokens · k, experts)
    before = one_hot.cumsum(0) - one_hot  # copies of the same expert that come earlier
    return ((before * one_hot).sum(1) < capacity).view_as(chosen)
    ### END SOLUTION


# %%
lab.check_within_capacity(within_capacity)

# %%
lab.show_dropped(within_capacity)

# %% [markdown]
# **Notice:** a factor of 1 drops many copies of an unbalanced router, and few of a balanced one.
# DeepSeek-V3 drops none (section 2.1.2), because its bias keeps the counts close enough.

# %% [markdown]
# ## Experts with FSDP
#
# With EP 2 on 4 ranks, each rank still keeps complete attention, router, embedding and half of all experts, with gradients and optimizer
# states. FSDP shards them further, but over different ranks: an expert only over its *replicas*, because no other rank has it. All
# else is sharded over all ranks.
#
# FSDP averages the gradients over the ranks that it shards over. For experts that is the fault of 9.4. Two methods of `FSDPModule`
# change it: `set_gradient_divide_factor(ranks)`, and, because gloo cannot scale while it
# sums, `set_force_sum_reduction_for_comms(True)`.

# %% [markdown]
# ### Exercise 9.8 · Shard experts and the rest
#
# *Difficulty 3 of 5 · 20 minutes · target: equal to one process for 5 steps, on 2 × 2 and 4 × 2 ranks; 1/N of all states on each rank*
#
# `mesh` has the dimensions "replicate" and "expert". Its first has two ranks or more. `everyone` is a mesh of one dimension with all ranks. Shard the experts of each
# layer first, then the block, then the model. Create the optimizer last.

# %%
# Exercise 9.8: EP inside, FSDP outside
def expert_fsdp(model, optimizer_class, mesh, everyone, **settings):
    ### BEGIN SOLUTION
    for block in model.layers:
        block.mlp = ExpertParallelLayer(block.mlp, mesh["expert"].get_group())
        fully_shard(block.mlp.experts, mesh=mesh["replicate"])
        block.mlp.experts.set_force_sum_reduction_for_comms(True)
        block.mlp.experts.set_gradient_divide_factor(everyone.size())
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model, optimizer_class(model.parameters(), **settings)
    ### END SOLUTION


# %%
lab.check_expert_fsdp(expert_fsdp)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `fully_shard` on a module takes all its parameters that no earlier call has taken. So the order decides: first what is inside.
#
# The gradient of an expert is right if the sum over its replicas is divided by the number of *all* ranks: `everyone.size()`.
#
# </details>

# %%
lab.show_memory(expert_fsdp)

# %%
lab.show_trace(expert_fsdp)

# %% [markdown]
# **Notice:** the all-to-alls are exposed: the experts wait for the rows, and the next layer for the experts. FSDP's all-gathers
# are prefetched, and an all-to-all cannot be.
#
# Two things hide it. The shared expert needs no row of another rank, so it can compute meanwhile. And a second micro-batch can:
# *DualPipe* ([DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.2.1) computes for one while rows of the other are sent.

# %%
lab.show_dual_pipe()

# %% [markdown]
# ## Send tokens or gather parameters
#
# FSDP without expert parallelism also trains a mixture: it gathers all experts of a layer on every rank, twice in a step, and
# reduce-scatters their gradients. With EP a rank gathers 1/EP of them, but sends tokens. Which is less?

# %% [markdown]
# ### Exercise 9.9 · Bytes of a layer
#
# *Difficulty 2 of 5 · 15 minutes · target: exact for three models, all group sizes, any number of tokens*
#
# Return the bytes that one rank *receives* for one layer and step, with one micro-batch of `tokens` tokens, all numbers in 2 bytes: of
# expert parameters and their gradients (FSDP over the `ranks // expert` replicas; all-gather in forward and in backward,
# reduce-scatter) and of rows (spread evenly). `parameters` are those of all experts of the layer.

# %%
# Exercise 9.9: (bytes of parameters and gradients, bytes of rows)
def layer_bytes(parameters, hidden, k, tokens, ranks, expert):
    ### BEGIN SOLUTION
    replicas = ranks // expert
    mine = 2 * parameters / expert  # bytes of the experts that a rank computes with
    of_parameters = 3 * mine * (replicas - 1) / replicas
    of_rows = 4 * 2 * k * tokens * hidden * (expert - 1) / expert
    return of_parameters, of_rows
    ### END SOLUTION


# %%
lab.check_layer_bytes(layer_bytes)

# %%
lab.show_layer_bytes(layer_bytes)

# %% [markdown]
# **Notice:** gathering costs the same for any number of tokens, sending is proportional to it. With few tokens a rank, or many
# experts, sending is less. So Mixtral can be trained with FSDP alone, and DeepSeek-V3 cannot.

# %% [markdown]
# ## What will it take
#
# The planner counts what this notebook has measured: experts of a rank, copies that are kept for backward, four all-to-alls a layer, and the
# host. `plan.expert` is EP. Guess: how many seconds does a step of 4 million tokens of DeepSeek-V3 take on 2,048 H100s?

# %%
# A guess, for the table below
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION
labs.guess("9.9b", "seconds of a step of DeepSeek-V3 on 2,048 H100s", my_guess)

# %%
lab.show_plans()

# %%
lab.show_published_runs()

# %% [markdown]
# ## A script of your own
#
# ### Exercise 9.10 · `moe.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: the saved model equals that of one process, on 2 and 4 ranks; each rank has its
# part of the experts*
#
# The next cell writes the file. It uses plain PyTorch, and has three gaps: `keep_own_experts`, `compute` and
# `average_gradients`. Your functions of exercises 9.3 and 9.4 fit with few changes. Its `full_state` gathers the
# experts in the ranks' order, and rank 0 saves them.

# %%
lab.write_script("moe.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# `keep_own_experts` runs before the optimizer exists. It replaces both parameters of `self.experts` by this rank's part,
# and `self.group` says which part that is. A slice of a parameter keeps the complete tensor allocated, so it is cloned.
#
# `compute` gets copies sorted by expert and a tensor with a count for each expert. It returns outputs in the same order, as in
# exercise 9.3.
#
# In `average_gradients`, `mesh["replicate"].get_group()` has the ranks with the same experts, and `dist.group.WORLD` all.
#
# </details>

# %%
lab.check_moe("moe.py")

# %%
lab.torchrun("moe.py", "--expert", 2, ranks=4)

# %% [markdown]
# ## Optional: without scaffold
#
# The last exercises say what must come out, and nothing of the way there.

# %% [markdown]
# ### Exercise 9.11 · Experts without a loop
#
# *Difficulty 3 of 5 · 25 minutes · target: the outputs and gradients of `Experts`, in as many operations for 16 experts as for 4*
#
# A loop starts two small multiplications for each expert: with 256 experts a GPU mostly waits for the CPU. `F.grouped_mm` multiplies all blocks in one call;
# with `torch.bmm` blocks are padded to the largest count. No tensor may have a matrix for each copy.

# %%
# Exercise 9.11: all experts of a rank at once
class GroupedExperts(Experts):
    def forward(self, copies, counts):
        ### BEGIN SOLUTION
        ends = torch.tensor(counts, device=copies.device).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(copies, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        ### END SOLUTION


# %%
lab.check_grouped_experts(GroupedExperts)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `F.grouped_mm(a, b, offs=ends)`: `a` is (rows, in), `b` (experts, in, out), and `ends` has for each expert the row after its last one, as int32.
# The matrices of `Experts` are (out, in).
#
# </details>

# %% [markdown]
# ### Exercise 9.12 · A checkpoint for another EP
#
# *Difficulty 3 of 5 · 30 minutes · target: saved with EP 4, loaded with EP 2 and the reverse; each number is written once*
#
# The experts of `model` are divided over `mesh["expert"]`; ranks of `mesh["replicate"]` have the same ones, and all ranks the rest. `load_experts` fills the
# parameters in place, on a mesh of another shape. All ranks see the empty `folder`. None gathers experts. Use `torch.distributed.checkpoint` with
# DTensors, or files of your own.

# %%
# Exercise 9.12: every rank writes and reads its part
def as_dtensors(model, mesh):  # of use with DCP; delete it if you write files of your own
    ### BEGIN SOLUTION
    return {name: DTensor.from_local(p.detach(), mesh, [Replicate(), Shard(0)])
            if ".experts." in name else p.detach() for name, p in model.named_parameters()}
    ### END SOLUTION


def save_experts(model, folder, mesh):
    ### BEGIN SOLUTION
    dcp.save(as_dtensors(model, mesh), checkpoint_id=folder)
    ### END SOLUTION


def load_experts(model, folder, mesh):
    ### BEGIN SOLUTION
    dcp.load(as_dtensors(model, mesh), checkpoint_id=folder)  # into the parameters' memory
    ### END SOLUTION


# %%
lab.check_expert_checkpoint(save_experts, load_experts)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `DTensor.from_local(part, mesh, placements)` copies nothing. Its placements say along which dimension of the tensor each dimension of the mesh shards it.
# DCP writes what is replicated once.
#
# </details>

# %% [markdown]
# ### Exercise 9.13 · DiLoCo
#
# *Difficulty 3 of 5 · 30 minutes · target: the parameters of one process that follows the formulas; one all-reduce of Ψ numbers a round*
#
# Between data centres even one all-reduce a step is too much. In *[DiLoCo](https://arxiv.org/abs/2311.08105)* each rank takes `every` steps of AdamW alone. Then `shared` (the parameters at the start of the round) minus the
# mean of the ranks' parameters is the gradient for SGD with Nesterov momentum on `shared`, and all continue from it.

# %%
# Exercise 9.13: trains the model in place; the length of batches is a multiple of `every`
def train_diloco(model, batches, every, inner_lr, outer_lr, momentum):
    ### BEGIN SOLUTION
    parameters = [p for p in model.parameters() if p.requires_grad]
    shared = [p.detach().clone() for p in parameters]
    inner = torch.optim.AdamW(parameters, lr=inner_lr)
    outer = torch.optim.SGD(shared, lr=outer_lr, momentum=momentum, nesterov=True)
    for step, batch in enumerate(batches, 1):
        model(**batch).loss.backward()
        inner.step()
        inner.zero_grad()
        if step % every == 0:
            for p, s in zip(parameters, shared):  # the same order on all ranks
                s.grad = (s - p.detach()) / dist.get_world_size()
                dist.all_reduce(s.grad)
            outer.step()
            torch._foreach_copy_([p.data for p in parameters], shared)
    ### END SOLUTION


# %%
lab.check_diloco(train_diloco)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Both optimizers keep their states for the whole training. The outer one is `torch.optim.SGD` on copies of the parameters, whose `.grad` you set.
#
# </details>

# %%
lab.show_diloco(train_diloco)

# %% [markdown]
# **Notice:** on the link between the two hosts of notebook 06 DiLoCo sends a small part of what data parallelism sends. *Streaming* DiLoCo reduces fragments at different
# times: where ranks differ in their order, they wait for ever (*[torchft 206](https://github.com/meta-pytorch/torchft/pull/206)*).

# %% [markdown]
# ### Exercise 9.14 · Weights for generators
#
# *Difficulty 3 of 5 · 25 minutes · target: the weights of four trainers on two generators, which receive their own shards alone*
#
# In reinforcement learning some ranks train, others generate with the new weights. `sync_weights` runs on all. On a rank of `trainers`, `model` is
# sharded by FSDP. On the g-th of `generators` it is plain and has the g-th part (`chunk`) of each parameter along dimension 0, in `dtype`: fill it in place.

# %%
# Exercise 9.14: on all ranks; trainers and generators are lists of ranks
def sync_weights(model, trainers, generators, dtype):
    ### BEGIN SOLUTION
    me = dist.get_rank()
    for p in model.parameters():
        if me in generators:
            dist.recv(p.data, trainers[0])
            continue
        full = p.full_tensor().detach().to(dtype)  # a collective: on all trainers
        if me == trainers[0]:
            for generator, part in zip(generators, full.chunk(len(generators))):
                dist.send(part, generator)
    ### END SOLUTION


# %%
lab.check_weight_sync(sync_weights)

# %% [markdown]
# <details><summary>Hint</summary>
#
# All trainers walk through the same parameters. `full_tensor()` on each of them, then `dist.send` on one and `dist.recv` on the generators. A parameter's `.data` is its memory.
#
# </details>

# %% [markdown]
# **Notice:** `full_tensor()` hides an all-gather: on the rank that sends alone it waits for ever. On GPUs more can go wrong. While rank 0 still sends on another group, the others begin the next all-gather; with sends on
# other streams that was a deadlock in *[trl 7103](https://github.com/huggingface/trl/issues/7103)*. Its fix gathers all parameters before the first is sent, and needs memory for them.

# %% [markdown]
# ## Optional: types of tensors on ranks
#
# Nothing in torch says whether ranks have equal tensors, parts of one, or terms of a sum. Faults like those of 9.4 run without an error.
# **spmd-types** (*[its documentation](https://meta-pytorch.org/spmd_types/)*) gives each tensor a type for each dimension of the mesh, and checks
# each operation. It is an extra (`types`): the first cell below says how to install it.

# %% [markdown]
# | Type | On the ranks | Its gradient |
# |:--|:--|:--|
# | R, replicated | equal tensors | P: each rank has a term |
# | I, invariant | equal tensors | I: summed already |
# | V, varying | different tensors | V |
# | S(d) | shards along dimension d; shown as V | V |
# | P, partial | terms of a sum | R |
#
# `assert_type` declares a type, all others are inferred. A column-parallel layer before a row-parallel one, as in notebook 07a:

# %%
def column_then_row(mesh, reduce):
    from spmd_types import I, P, R, S, all_reduce, assert_type, convert
    x = assert_type(torch.randn(4, 8, requires_grad=True), {"data": S(0), "tensor": I})
    up = assert_type(torch.randn(8, 8), {"data": R, "tensor": S(0)})
    down = assert_type(torch.randn(8, 8), {"data": R, "tensor": S(1)})
    copied = convert(x, "tensor", src=I, dst=R)  # nothing in forward, an all-reduce in backward
    hidden = F.silu(F.linear(copied, up))
    y = partial = F.linear(hidden, down)
    if reduce:
        y = all_reduce(partial, "tensor", src=P, dst=I)
    return {"x": x, "up": up, "down": down, "copied": copied, "hidden": hidden,
            "partial": partial, "output": F.rms_norm(y, (8,))}


lab.show_types(column_then_row, ("data", "tensor"), True)

# %% [markdown]
# Without the all-reduce all shapes fit:

# %%
lab.show_types(column_then_row, ("data", "tensor"), False)

# %% [markdown]
# The same for the experts. Which gradients are summed over which ranks? Each P says it:

# %%
def expert_layer(mesh):
    from spmd_types import R, V, all_to_all, assert_type
    x = assert_type(torch.randn(2, 3, 8), {"replicate": V, "expert": V})  # 3 rows for each rank
    router = assert_type(torch.randn(4, 8), {"replicate": R, "expert": R})
    expert = assert_type(torch.randn(8, 8), {"replicate": R, "expert": V})
    y = all_to_all(all_to_all(x, "expert") @ expert, "expert")
    return {"x": x, "router": router, "expert": expert, "y": y}


lab.show_types(expert_layer, ("replicate", "expert"), shards=False)

# %% [markdown]
# **Notice:** this is exercise 9.4. The router's gradient is a sum over both dimensions, an expert's over its replicas. Who sums it over the other dimension too,
# adds gradients of different experts:

# %%
def summed_gradient(mesh, dimensions):
    from spmd_types import P, V, assert_type
    gradient = assert_type(torch.randn(8, 8), {"replicate": P, "expert": V})  # an expert's
    for name in dimensions:
        dist.all_reduce(gradient, group=mesh.get_group(name))
    return {"gradient": gradient / 2}


lab.show_types(summed_gradient, ("replicate", "expert"), ["replicate", "expert"], shards=False)

# %%
lab.show_types(summed_gradient, ("replicate", "expert"), ["replicate"], shards=False)

# %% [markdown]
# **Notice:** the last one is accepted, and it is `experts_doubled`: types say what is summed, not by which number it is divided, nor in which
# order rows arrive.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | a hang in an all-to-all | a rank without rows left it out, or splits that do not match |
# | right loss, wrong outputs of some tokens | copies in the order of arrival given to `Experts` |
# | gradients of experts EP times too large | averaged over the replicas only |
# | gradients of experts grow with micro-batches | summed again after each |
# | the router does not learn | weights detached, or computed from indices |
# | loss right with one rank, wrong with two | the router's gradient was not averaged |

# %% [markdown]
# ## I can …
#
# - count a mixture's active parameters
# - write route, dispatch and combine, and test them against a loop
# - divide experts over ranks and send uneven numbers of tokens
# - say which gradients are averaged over which ranks, and prove it
# - balance experts by a loss or a bias, and say what capacity drops
# - combine expert parallelism with FSDP
# - say when to send tokens and when to gather parameters

# %% [markdown]
# ## What to read
#
# - Shazeer et al., *[Outrageously Large Neural Networks](https://arxiv.org/abs/1701.06538)*, 2017, section 3.1: which two kinds of parallelism are combined, and why does that keep each expert's batch large?
# - Lepikhin et al., *[GShard](https://arxiv.org/abs/2006.16668)*, 2020, section 2.2: what happens to a token beyond the capacity?
# - DeepSeek-AI, *[DeepSeek-V3](https://arxiv.org/abs/2412.19437)*, 2024, section 3.2: how many nodes may one token be sent to, and why?
# - Qiu et al., *[Demons in the Detail](https://arxiv.org/abs/2501.11873)*, 2025, section 3: what has to be communicated to balance over the global batch?

# %% [markdown]
# ## What comes next
#
# This is the last notebook. The optional parts above have no scaffold, and the planner, `./scripts/plan`, takes any model.
