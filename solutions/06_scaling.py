# %% [markdown]
# # 06 · Scaling
#
# | | |
# |:--|:--|
# | **Time** | 10 minutes |
# | **Needs** | any machine with 2 cores; no GPU |
#
# Say here, in two sentences, what the student builds in this notebook, and why it is needed.

# %% [markdown]
# ## You will be able to
#
# - find the largest number over all ranks.
#
# Run a cell with Shift+Enter. Where you see `# your code here`, it is your turn.

# %%
import torch.distributed as dist

import labs
import labs.scaling as lab

# %% [markdown]
# ## The largest over ranks
#
# Open each section with a need, in numbers. Here: ranks 0, 1, 2 and 3 hold 1, 4, 9 and 16, and each
# rank must know the largest number before it can scale its own. Introduce each name of the lab with
# a call that runs: `lab.own_number()` gives the number that a rank begins with.

# %% tags=["nbval-check-output"]
print(labs.launch(lab.own_number, ranks=4))

# %% [markdown]
# Guess before you run: after the exercise, which number will rank 0 hold?

# %%
# A guess, for exercise 6.1: put a number in place of the dots
### BEGIN SOLUTION
my_guess = 16
### END SOLUTION

labs.guess("6.1", "the number that rank 0 will hold", my_guess)

# %% [markdown]
# ### Exercise 6.1 · The largest over ranks
#
# *Difficulty 1 of 5 · 5 minutes · target: every rank returns the largest number, with one
# collective*
#
# `mine` itself stays unchanged. `dist.ReduceOp.MAX` is what all-reduce can do besides a sum. An
# exercise of difficulty 3 or more has a folded hint, `<details>`, in a text cell after its gap.

# %%
# Exercise 6.1: the largest over ranks
def largest_over_ranks(mine):
    """The largest of all ranks' one-element tensors `mine`, on every rank."""
    ### BEGIN SOLUTION
    largest = mine.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
    ### END SOLUTION


# %%
lab.check_largest_over_ranks(largest_over_ranks)

# %%
lab.before_and_after(largest_over_ranks, ranks=4)

# %% [markdown]
# Notice that every rank holds the same number afterwards: one collective was enough, and each rank
# took part in it.

# %% [markdown]
# ## I can …
#
# - [ ] find the largest number over all ranks, and say which ranks know it

# %% [markdown]
# ## How it usually goes wrong
#
# - **`all_reduce` overwrites** its argument; keep a clone.

# %% [markdown]
# ## What to read
#
# | read | by | a question |
# |:--|:--|:--|
# | [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html) | PyTorch | Which operations besides MAX can all-reduce do, and for which is the order of the ranks irrelevant? |

# %% [markdown]
# ## What comes next
#
# Name the next notebook here, and what of this one it needs.
