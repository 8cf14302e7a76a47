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
# ## PART D: a ring for long sequences

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
