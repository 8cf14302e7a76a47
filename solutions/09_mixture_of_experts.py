# %% [markdown]
# # 09 · Mixture of experts
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 225 minutes in two sittings (110 + 115), 120 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU |
#
# In a mixture of experts a token uses only some of a layer's parameters. Here you write such a layer,
# divide its experts over ranks, and find out which gradients have to be averaged over which ranks.
# Then you balance the experts, combine them with FSDP, and compute what training takes.

# %% [markdown]
# *On a CPU* the collectives, their bytes and the memory of each rank are those of a GPU node. The
# seconds are not: where they matter, a stated time for each token or byte stands in their place.

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
# each token. But 58 of its 61 layers have 256 MLPs instead of one, the **experts**. A linear
# layer, the **router**, chooses 8 of them for each token. One more, the **shared expert**, is used by
# all tokens.
#
# The model below has shapes and no memory, so it can be counted. In a layer, after attention:

# %%
model = lab.on_meta("DeepSeek-V3")
{name: list(p.shape) for name, p in model.model.layers[5].mlp.named_parameters()}

# %% [markdown]
# `experts.gate_up_proj` has the matrices of all 256 experts; its first dimension is the expert. (In
# transformers 4 each expert has matrices of its own.) `gate` is the router. Guess: what percentage
# of DeepSeek-V3's parameters does one token use?

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
# which a token uses: k of the `experts` in each expert layer, and everything else. Parameters of the
# experts among which the router chooses have `.experts.` in their names, those of a shared expert
# `.shared_experts.`.

# %%
# Exercise 9.1: all parameters, and those that a token uses
def count_parameters(model, experts, k):
    ### BEGIN SOLUTION
    total = chosen = 0  # parameters; those of the experts that the router chooses among
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if ".experts." in name:
            chosen += parameter.numel()
    return total, total - chosen + chosen * k // experts
    ### END SOLUTION


# %%
lab.check_count_parameters(count_parameters)

# %%
lab.show_parameters(count_parameters)

# %% [markdown]
# **Notice:** DeepSeek-V3's matrices compute for a token about as much as a dense model of 38 billion
# parameters, half as much as Llama-3-70B. But all 671 billion need memory, with their gradients and
# optimizer states: 10.7 TB, which are the states of 134 GPUs of 80 GB with nothing else on them.

# %% [markdown]
# ## Router, dispatch and combine
#
# For each token the router computes one **logit** for each expert. Softmax makes probabilities of
# the logits, and the k largest are chosen. Their probabilities, divided by their sum, are the
# weights with which the outputs of the k experts are added:
#
# y = Σ wᵢ · expertᵢ(x), over the k chosen experts i.

# %% [markdown]
# A loop over the experts with a mask for each is correct, and slow: it reads all tokens once for
# each expert. So tokens are *sorted* by expert first. Each expert then multiplies one contiguous
# block.

# %%
class Experts(nn.Module):
    """gate_up (experts, 2·ffn, hidden) and down (experts, hidden, ffn) of gated MLPs."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = Parameter(gate_up), Parameter(down)

    def forward(self, copies, counts):
        """copies (n, hidden), sorted by expert; counts: how many belong to each, a list."""
        outputs = []
        blocks = copies.split(counts)
        for block, gate_up, down in zip(blocks, self.gate_up, self.down, strict=True):
            gate, up = F.linear(block, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


# %% [markdown]
# Each token is copied k times, once for each of its experts. **Dispatch** sorts these copies by
# expert, **combine** brings the outputs back into the order of the tokens and adds them. For three
# tokens, two experts each:

# %%
experts = [2, 0, 1, 2, 0, 2]  # of copies 0 to 5: copies 0 and 1 are token 0's, 2 and 3 token 1's
order = sorted(range(6), key=lambda copy: experts[copy])
{"order": order, "their tokens": [copy // 2 for copy in order],
 "copies for each expert": [experts.count(expert) for expert in range(3)]}

# %% [markdown]
# Guess: 1,024 tokens of text, 8 experts, 2 for each token, and a model that has not been trained.
# How many copies does the busiest expert get? The mean is 256.

# %%
# A guess, for exercise 9.2
### BEGIN SOLUTION
my_guess = 350
### END SOLUTION
labs.guess("9.2", "copies for the expert with the most of them, of 2,048", my_guess)

# %% [markdown]
# ### Exercise 9.2 · Route, dispatch, combine
#
# *Difficulty 2 of 5 · 20 minutes · target: outputs and gradients of the loop over experts, for any
# k, also where an expert gets no token*
#
# `route` computes softmax in fp32; its weights have the dtype of the logits. `dispatch` returns
# the copies sorted by expert, an expert's own in any order; a tensor of counts; and `order`, with
# which `combine` restores the order of the tokens. There may be no tokens.

# %%
# Exercise 9.2: who goes to which expert
def route(logits, k):
    """logits (tokens, experts) -> weights (tokens, k), chosen experts (tokens, k)."""
    ### BEGIN SOLUTION
    probabilities = logits.softmax(-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(k)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen
    ### END SOLUTION


# %%
# Exercise 9.2, continued: to the experts, and back
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
# These three functions make the layer of one rank. It replaces `layer`, the workbook's own, which
# loops over all experts, and takes its parameters. The outputs and gradients are also those of
# Hugging Face's `MixtralSparseMoeBlock`: the workbook's tests compare the two.

# %%
class ExpertLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.k, self.router = layer.k, layer.router
        self.shared_experts = layer.shared_experts
        self.experts = Experts(layer.experts.gate_up, layer.experts.down)

    def forward(self, x):
        tokens = x.flatten(0, -2)  # (tokens, hidden)
        weights, chosen = route(self.router(tokens), self.k)
        copies, counts, order = dispatch(tokens, chosen, self.router.out_features)
        result = combine(self.compute(copies, counts), order, weights).view_as(x)
        return result if self.shared_experts is None else result + self.shared_experts(x)

    def compute(self, copies, counts):
        return self.experts(copies, counts.tolist())


# %%
lab.show_dispatch(route, dispatch)

# %% [markdown]
# **Notice:** the experts get very different numbers of copies, though the router is random: some
# bytes are frequent in a text, and equal bytes choose similar experts. With one expert per GPU,
# seven would wait for the eighth. "Balance" below comes back to this.

# %% [markdown]
# ## Experts on several ranks
#
# A layer of DeepSeek-V3 has 11.3 billion parameters in its experts, 22.5 GB in bf16. FSDP gathers
# a complete layer before it is used, on every rank.
#
# Under **expert parallelism** each of N ranks keeps 1/N of the experts and *tokens* are sent
# instead: each copy to the rank that has its expert, and the output back.

# %% [markdown]
# That is one **all-to-all** each way: a collective in which every rank sends a different part of its
# rows to each rank. All else stays data parallel: each rank has its own samples, and complete
# attention, router and shared expert.

# %% [markdown]
# `dist.all_to_all_single(output, input, receive, send)` sends the first `send[0]` rows of `input`
# to rank 0, the next `send[1]` rows to rank 1, and so on. `receive[i]` says how many rows come
# from rank i. No rank knows that in advance, so the counts are sent first, in an all-to-all of
# equal parts.

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
# Let b·s be the tokens of a rank and h the hidden size, with 4-byte numbers. Guess: with k = 2,
# how many times b·s·h·4 bytes does one of 4 ranks send to other ranks in one layer, forward and
# backward together, if tokens spread evenly?

# %%
# A guess, for exercise 9.3
### BEGIN SOLUTION
my_guess = 6
### END SOLUTION
labs.guess("9.3", "times b·s·h·4 bytes sent in a layer, forward and backward", my_guess)

# %% [markdown]
# ### Exercise 9.3 · Expert parallelism
#
# *Difficulty 4 of 5 · 35 minutes · target: outputs and gradients of the complete layer on 2, 3 and
# 4 ranks; 1/N of the experts on a rank; four all-to-alls of rows a layer*
#
# `AllToAll` sends rows forward, and in backward their gradients the same way back. Rank r keeps
# the r-th of N equal parts of the experts, in memory of its own.

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
# The layer is the one above with another `compute`, which returns the outputs in the order of
# `copies`, wherever their experts are. First it needs the counts of all ranks: `theirs[i, j]` is
# the number of copies that rank i sends for the j-th of this rank's experts.

# %%
def exchange_counts(counts, group):
    """counts (experts,) -> counts and theirs, each (ranks, experts of a rank)."""
    ranks, theirs = dist.get_world_size(group), torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    return counts.view(ranks, -1), theirs.view(ranks, -1)


# %% [markdown]
# The copies that arrive are sorted by the rank that sent them, and for each rank by expert. But
# `Experts` needs all copies of an expert in one block. So they are sorted once more, and the
# outputs are put back into the order of arrival before they are returned.

# %%
# Exercise 9.3, continued: this rank's experts compute what all ranks send
class ExpertParallelLayer(ExpertLayer):
    def __init__(self, layer, group):
        super().__init__(layer)
        self.group, ranks, rank = group, dist.get_world_size(group), dist.get_rank(group)
        ### BEGIN SOLUTION
        gate_up, down = layer.experts.gate_up.detach(), layer.experts.down.detach()
        self.experts = Experts(gate_up.chunk(ranks)[rank].clone(), down.chunk(ranks)[rank].clone())
        ### END SOLUTION

    def compute(self, copies, counts):
        counts, theirs = exchange_counts(counts, self.group)
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
# `copies` is sorted by expert, so also by the rank that has the expert: it can be sent as it is.
# Row r of `counts` has the counts for rank r's experts.
#
# For the second sort: write down, for each row that arrives, the number of its expert, 0, 1, … on
# this rank. These numbers repeat for each rank, as often as `theirs` says. `argsort(stable=True)`
# of them is the order, and its `argsort()` the way back.
#
# Splits are lists of ints. A rank may send or receive no row, and takes part all the same.
#
# </details>

# %%
lab.show_bytes(ExpertParallelLayer)

# %% [markdown]
# **Notice:** each of the four all-to-alls of rows sends about k·b·s·h·(N − 1)/N elements: with
# experts on N ranks, a rank keeps about 1/N of its copies. The counts are a few bytes, but a rank
# must wait for them: without them it cannot allocate the output.

# %% [markdown]
# PyTorch has this function, too, in a module whose name begins with `_`, so it may change. torchtitan
# uses it, and the check accepts it in place of `AllToAll`. Below it sends the rows of
# `counts_then_rows`. Each rank multiplies what arrives by 1 + rank, so a row's gradient says to
# which rank it was sent.

# %%
def torchs_all_to_all():
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    rank = dist.get_rank()
    send, receive = [[1, 3], [2, 0]][rank], [[1, 2], [3, 0]][rank]
    rows = (torch.arange(sum(send)) + 10.0 * rank).requires_grad_()
    arrived = all_to_all_single_autograd(rows, receive, send, dist.group.WORLD)
    ((1 + rank) * arrived).sum().backward()
    return {"rows": arrived.tolist(), "gradients": rows.grad.tolist()}


labs.launch(torchs_all_to_all, ranks=2, quiet=True)

# %% [markdown]
# ## Gradients of experts and of the rest
#
# N ranks train on N equal parts of a batch. The batch's loss is the mean of their N losses. Attention,
# router and shared expert are replicated, so DDP's rule holds: average over all N.

# %% [markdown]
# An expert is different. Let N = 4, and let groups of two ranks divide the experts: the degree of expert
# parallelism, **EP**, is 2. Then each expert is on two ranks, one of each group: its **replicas**. In
# backward a replica gets gradients from *both* ranks of its group, summed.

# %%
def groups_of_ranks():
    mesh = init_device_mesh(labs.device().type, (2, 2), mesh_dim_names=("replicate", "expert"))
    return {"divides its experts with": dist.get_process_group_ranks(mesh["expert"].get_group()),
            "has the same experts as": dist.get_process_group_ranks(mesh["replicate"].get_group())}


labs.launch(groups_of_ranks, ranks=4, quiet=True)

# %% [markdown]
# Suppose that each expert's gradient is averaged over its two replicas, as DDP would do it. Guess: how many
# times too large is it then, with EP = 2?

# %%
# A guess, for exercise 9.4
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("9.4", "times too large, averaged over the replicas", my_guess)

# %% [markdown]
# ### Exercise 9.4 · Gradients to average
#
# *Difficulty 3 of 5 · 15 minutes · target: equal to one process for 5 steps with SGD and AdamW, for
# EP × replicas of 2 × 1, 1 × 2, 2 × 2 and 4 × 1*
#
# `average_gradients(model, replicas)` changes all gradients after backward. `replicas` is the group of
# ranks that have the same experts. An expert without tokens has a gradient of zeros, a frozen parameter
# none. Names of experts contain `.experts.`, those of the shared expert `.shared_experts.`.

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


# %%
lab.check_average_gradients(average_gradients)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Write the gradient of the batch's loss as a sum over ranks: 1/N times the sum of what each rank's loss gives. For a replicated
# parameter each rank has one term of the sum. For an expert, how many terms are in its `.grad` already after backward? The
# replicas have the others. The factor in front of the sum is the same for both.
#
# </details>

# %% [markdown]
# The check divides the experts by a layer of its own, so 9.4 does not depend on 9.3. With your layer, the complete
# strategy is this. The optimizer averages before each of its steps, so several micro-batches may accumulate first:

# %%
def expert_parallel(model, optimizer_class, expert=2, **settings):
    shape = dist.get_world_size() // expert, expert
    mesh = init_device_mesh(labs.device().type, shape, mesh_dim_names=("replicate", "expert"))
    group, replicas = mesh["expert"].get_group(), mesh["replicate"].get_group()
    for block in model.layers:
        block.mlp = ExpertParallelLayer(block.mlp, group)
    optimizer = optimizer_class(model.parameters(), **settings)
    optimizer.register_step_pre_hook(lambda *_: average_gradients(model, replicas))
    return model, optimizer


# %% [markdown]
# ## Find the fault
#
# Four of these five faults were published. None of them stops a run:
#
# | name | what happens | seen in |
# |:--|:--|:--|
# | `experts_doubled` | experts averaged over their replicas only | [pytorch 160285](https://github.com/pytorch/pytorch/issues/160285) |
# | `summed_each_time` | each micro-batch doubles what earlier ones left for the experts | [Megatron-LM 6660](https://github.com/NVIDIA/Megatron-LM/issues/6660) |
# | `router_partial` | each rank keeps its own router gradient | [torchtitan 2387](https://github.com/pytorch/torchtitan/issues/2387) |
# | `weights_detached` | no gradient passes through the weights to the router | [NeMo Automodel 2092](https://github.com/NVIDIA-NeMo/Automodel/pull/2092) |
# | `shared_twice` | the shared expert's gradient is divided by N twice | |

# %% [markdown]
# AdamW divides each gradient by its own size, so it hides a constant factor. Below, 4 ranks with EP = 2 train with the right
# gradients, and with those of `experts_doubled`:

# %%
lab.show_adamw_hides_it()

# %% [markdown]
# **Notice:** under AdamW the two curves are one; under SGD they part. The loss falls in both, so no loss curve
# says that gradients are wrong. So compare *gradients* with those of one process, before an optimizer uses them, after one
# micro-batch and after several.

# %% [markdown]
# ### Exercise 9.5 · Which fault is it?
#
# *Difficulty 2 of 5 · 12 minutes · target: each fault named, for other models and world sizes too;
# None where there is none*
#
# `one` and `three` describe rank 0's gradients after one and three micro-batches. `one["router"]`
# is a pair: the gradient's norm divided by that of one process, and the cosine of the two; (0, 0) if
# it is zero. Other kinds are `experts`, `shared`, `rest`. Rounding changes both by less than 0.001. Five runs:

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
# **Notice:** where the router gets no gradient, the other gradients are off a little too, because a part of theirs came through the
# router. With EP = 1 `experts_doubled` changes nothing, so a test without expert parallelism cannot find it.

# %% [markdown]
# ## Second sitting · 115 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 9.6, 9.7, 9.8, 9.9, 9.10 |
# | **Optional** | 9.11 to 9.14 |
# | **In a new kernel** | run the cells of imports, `Experts`, `ExpertLayer`, `exchange_counts`, exercises 9.2 and 9.3, in order |
#
# You will be able to:
#
# - balance experts by a loss or by a bias, and say what each does to a rank's time;
# - shard experts and the rest over different ranks with FSDP;
# - say when tokens are cheaper to send than parameters.

# %% [markdown]
# ## Balance
#
# In each layer all ranks wait for the one with the most copies, in forward and in backward. Below, 4 ranks have
# two of 8 experts each, a copy takes 20 µs, and the router has not been trained. Guess: by what factor is the layer slower than with
# equal counts?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 1.5
### END SOLUTION
labs.guess("9.6b", "times slower than with equal counts", my_guess)

# %%
lab.show_slowest_rank()

# %% [markdown]
# **Notice:** the factor is the largest count of a rank divided by the mean, whatever the other ranks do. Training makes it
# worse: an expert that gets more tokens learns more, so the router prefers it. Two remedies are in use.

# %% [markdown]
# An **auxiliary loss** (*[Switch Transformer](https://arxiv.org/abs/2101.03961)*, section 2.2), multiplied by a small coefficient, is added to the
# language model's loss. It is E · Σ fᵢ · Pᵢ, summed over the E experts. fᵢ is expert i's share of all copies, Pᵢ its mean probability.
# Equal shares give 1. Only P has a gradient.
#
# Hugging Face's `load_balancing_loss_func` counts k copies for each token and divides by tokens. So it is k times ours.

# %% [markdown]
# ### Exercise 9.6 · Two ways to balance
#
# *Difficulty 2 of 5 · 20 minutes · target: values and gradients of the papers' formulas, for any k*
#
# All tensors are of one micro-batch. `chosen` may come from a router with a bias. Compute softmax in fp32.

# %%
# Exercise 9.6: balance by a loss
def auxiliary_loss(logits, chosen):
    """logits (tokens, experts), chosen (tokens, k) -> E · Σ f · P, which has a gradient."""
    ### BEGIN SOLUTION
    experts = logits.shape[1]
    shares = chosen.flatten().bincount(minlength=experts) / chosen.numel()
    return experts * (shares * logits.softmax(-1, dtype=torch.float32).mean(0)).sum()
    ### END SOLUTION


# %% [markdown]
# *Without a loss* (*[DeepSeek-V3](https://arxiv.org/abs/2412.19437)*, section 2.1.2): each expert has a bias. It is added to the
# probabilities to choose the k experts, for nothing else: the weights come from the probabilities alone. The bias gets no gradient.
# After each step it grows by `speed` for each expert with fewer copies than the mean, and
# shrinks by it for each with more.
#
# DeepSeek-V3 takes a sigmoid of each logit. We keep softmax. `route_with_bias` returns what `route` returns, `new_bias`
# a new tensor.

# %%
# Exercise 9.6, continued: balance by a bias
def route_with_bias(logits, bias, k):
    """logits (tokens, experts), bias (experts,) -> weights, chosen experts, (tokens, k) each."""
    ### BEGIN SOLUTION
    probabilities = logits.softmax(-1, dtype=torch.float32)
    chosen = (probabilities + bias).topk(k).indices
    weights = probabilities.gather(-1, chosen)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen
    ### END SOLUTION


def new_bias(bias, counts, speed):
    """bias, counts (experts,) -> the bias of the next step."""
    ### BEGIN SOLUTION
    counts = counts.float()
    return bias + speed * torch.sign(counts.mean() - counts)
    ### END SOLUTION


# %%
lab.check_balance(auxiliary_loss, route_with_bias, new_bias)

# %% [markdown]
# Now the same small mixture is trained three times on the same text, with your functions:

# %%
lab.show_balance(auxiliary_loss, route_with_bias, new_bias)

# %% [markdown]
# **Notice:** without either, training makes the counts more uneven than they were at the first step. Both remedies bring them
# nearer to the mean. The bias acts at once, the auxiliary loss only after some tens of steps.
#
# In so short a training the three losses of the language model are alike. In a long one the coefficient matters: its gradient competes with the language model's,
# and the bias has none.

# %% [markdown]
# The auxiliary loss is a product of two means. So its value for a batch is not the mean of its values for
# the batch's parts. Let there be two experts. If all tokens of one micro-batch choose expert 0, with a probability near 1, and all of another one
# expert 1, each micro-batch has a loss of almost 2, but the batch of both has 1.
#
# Here the router that was trained with the loss reads 8 micro-batches:

# %%
lab.show_micro_batches(auxiliary_loss)

# %% [markdown]
# **Notice:** the micro-batches look less balanced than the batch is. With accumulation, in a pipeline, or on several ranks, the usual
# code computes each micro-batch's loss, and so forces every sequence to use all experts alike.
#
# If the *counts* are summed over ranks and micro-batches first, the mean of the parts is exact: the loss is linear in P. Experts then have room to
# specialise (*[Qiu et al.](https://arxiv.org/abs/2501.11873)*).

# %% [markdown]
# ## Capacity
#
# Uneven sizes are slow on some hardware, and an expert that gets all copies needs memory for all. With a **capacity** c each expert
# takes at most c copies, the first in the order of the tokens, and drops the others. A token whose copies are all dropped has
# only its residual connection. The capacity is usually given as a factor: c = ⌈factor · tokens · k / E⌉.

# %% [markdown]
# ### Exercise 9.7 · Dropped tokens
#
# *Difficulty 2 of 5 · 12 minutes · target: exactly the first c copies of each expert, for any k and c*
#
# `within_capacity` returns a tensor of bools, (tokens, k): which copies are kept. All copies of a token come before those of later
# tokens. (*[GShard](https://arxiv.org/abs/2006.16668)* places all first choices before any second choice. Megatron-LM by default keeps the copies of
# highest probability.)

# %%
# Exercise 9.7: which copies an expert takes
def within_capacity(chosen, experts, capacity):
    """chosen (tokens, k) -> bool (tokens, k)."""
    ### BEGIN SOLUTION
    copies = chosen.flatten()
    one_hot = F.one_hot(copies, experts)  # (tokens · k, experts)
    earlier = one_hot.cumsum(0) - one_hot  # copies that came before, for each expert
    place = earlier.gather(1, copies[:, None]).squeeze(1)  # of each copy in its own expert
    return (place < capacity).view_as(chosen)
    ### END SOLUTION


# %%
lab.check_within_capacity(within_capacity)

# %%
lab.show_dropped(within_capacity)

# %% [markdown]
# **Notice:** a factor of 1 drops most copies of the router that was trained without balance, and few of the balanced one. With 2 of 8
# experts for each token a factor of 4 drops none, because c is then the number of tokens. DeepSeek-V3 drops none (section 2.1.2), because its bias keeps the counts close
# enough.

# %% [markdown]
# ## Experts with FSDP
#
# With EP 2 on 4 ranks, each rank still keeps complete attention, router and embedding, and half of all
# experts, with gradients and optimizer states. FSDP shards them further, but over different ranks: an
# expert only over the ranks that have the same one, and all else over all ranks. So there are two meshes of
# the same ranks. *[torchtitan](https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/parallel_dims.py)*
# calls them *sparse* and *dense*.

# %% [markdown]
# FSDP averages gradients over the ranks that it shards over. For experts that is the fault of 9.4. So
# `unit.set_gradient_divide_factor(n)` says by what number the sum of a unit's gradients is divided. gloo
# cannot multiply while it sums: there `unit.set_force_sum_reduction_for_comms(True)` is needed, too. A unit is a module
# after `fully_shard(module, mesh=...)`. (torchtitan sets n = 1 in all units, because it divides the loss by
# the number of tokens of all ranks.)

# %% [markdown]
# ### Exercise 9.8 · Shard experts and the rest
#
# *Difficulty 3 of 5 · 20 minutes · target: equal to one process for 5 steps, on 2 × 2 and 2 × 2 × 2 ranks;
# a quarter of all states on each rank*
#
# | ranks | `mesh` | `everyone` |
# |:--|:--|:--|
# | 4 | shard 2, expert 2 | shard 4 |
# | 8, HSDP (6.7) | replicate 2, shard 2, expert 2 | replicate 2, shard 4 |
#
# Replace each `block.mlp` by an `ExpertParallelLayer`; shard its experts, then the block, then the model.
# Create the optimizer last.

# %%
# Exercise 9.8: EP inside, FSDP outside
def expert_fsdp(model, optimizer_class, mesh, everyone, **settings):
    ### BEGIN SOLUTION
    same_experts = mesh[mesh.mesh_dim_names[:-1]]
    for block in model.layers:
        block.mlp = ExpertParallelLayer(block.mlp, mesh["expert"].get_group())
        fully_shard(block.mlp.experts, mesh=same_experts)
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
# Which ranks have the same experts? Those along all dimensions of `mesh` but "expert":
# `mesh["replicate", "shard"]`, or for any mesh `mesh[mesh.mesh_dim_names[:-1]]`.
#
# `fully_shard` on a module takes all its parameters that no earlier call has taken. So the order
# decides: first what is inside.
#
# The gradient of an expert is right if the sum over the ranks that have it is divided by the number of *all*
# ranks: `everyone.size()`. (Where "shard" has one rank, PyTorch 2.11 to 2.13 divides by it twice.)
#
# FSDP shards the first dimension, so here each rank gets some of the experts. With fewer experts than ranks
# it pads: one expert on two ranks takes the bytes of two. `shard_placement_fn` chooses another dimension.
#
# </details>

# %%
lab.show_memory(expert_fsdp)

# %% [markdown]
# **Notice:** FSDP alone leaves a rank the same states, but it gathers all experts of a layer. With EP 2
# a rank gathers half of them. That it sends rows instead shows in the step below.

# %%
lab.show_trace(expert_fsdp)

# %% [markdown]
# **Notice:** nothing is computed while rows are sent: the experts wait for the rows, and the next layer
# waits for the experts. FSDP's all-gathers are issued early, because parameters are known before they are needed. Rows
# are not. In backward an all-to-all even waits until FSDP's reduce-scatter has left the link.

# %% [markdown]
# Two things can compute meanwhile. The shared expert needs no row of another rank. And in *DualPipe*
# (*[DeepSeek-V3](https://arxiv.org/abs/2412.19437)*, section 3.2.1) a second micro-batch computes while rows of the first are sent.
#
# Let attention and experts take 1 unit of time, a shared expert and each all-to-all 0.5, and in backward all
# but the all-to-alls twice as much. Guess: in what percentage of the time does a rank compute nothing, if nothing overlaps?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 20
### END SOLUTION
labs.guess("9.8", "% of the time in which a rank computes nothing", my_guess)

# %%
lab.show_dual_pipe()

# %% [markdown]
# **Notice:** the shared expert hides one of two all-to-alls, and two micro-batches hide all of them. But
# then the activations of both are kept at the same time.

# %% [markdown]
# ## Send tokens or gather parameters
#
# FSDP without expert parallelism also trains a mixture: it gathers all experts of a layer on every
# rank, twice in a step, and reduce-scatters their gradients. For a layer of Mixtral a rank receives
# 8.3 GB then, for one of DeepSeek-V3 66.6 GB. With EP it gathers 1/EP of that at most, but sends
# tokens. Which is less?

# %% [markdown]
# ### Exercise 9.9 · Bytes of a layer
#
# *Difficulty 2 of 5 · 15 minutes · target: exact for three models and all group sizes*
#
# Return the bytes that one rank *receives* from others for one layer and one micro-batch of `tokens`
# tokens, all numbers in 2 bytes: of expert parameters and gradients (FSDP over the
# `ranks // expert` replicas: all-gather in forward and in backward, reduce-scatter), and of rows
# (spread evenly). `parameters` are those of all experts of the layer; `expert` is EP.

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

# %% [markdown]
# Is that what PyTorch sends? A small layer with real FSDP2 and all-to-alls, on 8 ranks:

# %%
lab.show_measured_bytes(layer_bytes)

# %%
lab.show_layer_bytes(layer_bytes)

# %% [markdown]
# **Notice:** gathering costs the same for any number of tokens, sending is proportional to it. All
# group sizes of a model meet in one point: there 6 bytes for each parameter are as much as
# 8·k·hidden bytes for each token. A micro-batch has a few thousand tokens, so sending is less for all three models. But
# bytes are not seconds: FSDP overlaps what it gathers, and an all-to-all is exposed.

# %% [markdown]
# ## What will it take
#
# Notebook 07b's planner takes, of all plans that fit, the fastest. For a mixture it also counts a
# rank's experts, copies kept for backward, four all-to-alls a layer (six if forward is recomputed),
# and the CPU's time to start the experts' kernels. Beside DP, TP and PP (data, tensor, pipeline
# parallelism) it chooses EP. Guess: how many seconds does a step of 4 million tokens of DeepSeek-V3
# take on 2,048 H100s?

# %%
# A guess, for the table below
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION
labs.guess("9.9b", "seconds of a step of DeepSeek-V3 on 2,048 H100s", my_guess)

# %%
lab.show_plans()

# %% [markdown]
# **Notice:** Mixtral and Qwen3-30B-A3B are about as fast without expert parallelism: their experts
# are gathered while a rank computes, or once for all micro-batches of a pipeline. The differences
# are smaller than the intervals. DeepSeek-V3 takes about four times as long without, because
# gathering its experts takes longer than all products.
#
# How far can such numbers be trusted? These are runs that others have published:

# %%
lab.show_published_runs()

# %% [markdown]
# **Notice:** memory can be trusted, seconds of a new code base cannot. The planner finds DeepSeek's
# plan too slow, because it knows neither DualPipe nor FP8: half of its step is all-to-alls that
# DeepSeek hides. (DeepSeek's step is longer than that of the table because it has 63 million tokens.)

# %% [markdown]
# ## A script of your own
#
# ### Exercise 9.10 · `moe.py`
#
# *Difficulty 3 of 5 · 25 minutes · target: the model of one process, on 2 and 4 ranks; a rank has its part of the experts*
#
# The next cell writes the file: plain PyTorch with three gaps, which are exercises 9.2 to 9.4 in one layer.
# `all_to_all_single_autograd` is your `AllToAll`. `full_state` gathers the experts in the order of the ranks.

# %%
lab.write_script("moe.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# First gap: `group.rank()` says which part of `gate_up` and `down` is this rank's. A slice keeps the complete tensor
# allocated, so it is cloned.
#
# `forward`: route, dispatch, send counts, send rows, sort by expert, compute with `mlp`, sort back, send back, combine.
# The layer has no shared expert.
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
# The last exercises say what must come out, and little of the way there.

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
# parameters in place, on another mesh. `folder` is empty, and all ranks see it. No rank gathers experts. Use `torch.distributed.checkpoint`, or
# files of your own.

# %%
# Exercise 9.12: every rank writes and reads its part
def save_experts(model, folder, mesh):
    ### BEGIN SOLUTION
    parts = {name: DTensor.from_local(p.detach(), mesh, [Replicate(), Shard(0)])
             if ".experts." in name else p.detach() for name, p in model.named_parameters()}
    dcp.save(parts, checkpoint_id=folder)
    ### END SOLUTION


def load_experts(model, folder, mesh):
    ### BEGIN SOLUTION
    parts = {name: DTensor.from_local(p.detach(), mesh, [Replicate(), Shard(0)])
             if ".experts." in name else p.detach() for name, p in model.named_parameters()}
    dcp.load(parts, checkpoint_id=folder)  # into the parameters' memory
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
    for p in model.parameters():
        if dist.get_rank() in generators:
            dist.recv(p.data, trainers[0])
            continue
        full = p.full_tensor().detach().to(dtype)  # a collective: on all trainers
        if dist.get_rank() == trainers[0]:
            for generator, part in zip(generators, full.chunk(len(generators))):
                dist.send(part, generator)
    ### END SOLUTION


# %%
lab.check_weight_sync(sync_weights)

# %% [markdown]
# <details><summary>Hint</summary>
#
# All trainers go through the same parameters, in the same order. `full_tensor()` on each of them, then `dist.send` on one and `dist.recv` on the generators. A parameter's `.data` is its memory.
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
# **Notice:** this is exercise 9.4. The router's gradient is a sum over both dimensions, an expert's over its replicas. A sum over the other dimension, too,
# would add gradients of different experts:

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
# | a hang in an all-to-all | a rank without rows left it out |
# | wrong outputs of some tokens | copies given to `Experts` in the order of arrival |
# | experts' gradients EP times too large | averaged over the replicas only |
# | they grow with each micro-batch | summed again, with what is summed already |
# | the router does not learn | detached weights |
# | replicas of the router differ | its gradient was not averaged |

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
# - Shazeer et al., *[Outrageously Large Neural Networks](https://arxiv.org/abs/1701.06538)*, 2017, section
#   3.1: which two kinds of parallelism are combined, and why?
# - Lepikhin et al., *[GShard](https://arxiv.org/abs/2006.16668)*, 2020, section 2.2: what becomes of a token
#   beyond the capacity?
# - DeepSeek-AI, *[DeepSeek-V3](https://arxiv.org/abs/2412.19437)*, 2024, section 3.2.2: to how many nodes may
#   a token be sent, and why?
# - Qiu et al., *[Demons in the Detail](https://arxiv.org/abs/2501.11873)*, 2025: what is communicated to
#   balance over the global batch?

# %% [markdown]
# ## What comes next
#
# This is the last notebook. `./scripts/plan` answers the questions of "What will it take" for any
# model, and the optional exercises above have no scaffold.
