# %% [markdown]
# # 08 · Surviving failure
#
# | In short | This notebook |
# |:--|:--|
# | **Time** | 270 minutes in three sittings (115 + 90 + 65), 35 more for optional parts |
# | **Needs** | any machine with 2 cores; no GPU; Linux for two hosts; torchft for the last section |
#
# A job on thousands of GPUs fails every few hours. In this notebook you kill ranks, damage files and
# disconnect hosts. The loss curve must continue as if nothing had happened.

# %% [markdown]
# ## You will be able to
#
# - save the complete training state, and prove that a resumed run equals the uninterrupted one bit for bit;
# - load a checkpoint on another number of ranks;
# - write checkpoints that survive a kill, a full disk and a flipped bit;
# - save asynchronously, and predict the host memory that this needs.

# %%
import copy
import hashlib
import io
import json
import math
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# %%
import labs
import labs.surviving_failure as lab

labs.warm_up()

# %% [markdown]
# ## The complete training state
#
# A job has failed, and new ranks resume it from a checkpoint. What must the checkpoint contain? Below,
# several copies of one job resume; each of them lacks one part of the state.
#
# First a guess: one copy lacks only the state of the learning-rate scheduler. Which of its next losses is
# the first wrong one?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("8.1", "without the schedule, the first loss that is wrong", my_guess)

# %%
lab.show_forgotten()

# %% [markdown]
# **Notice:** without Adam's moments the first loss is still equal, because a loss is computed before its
# update.
#
# Without the scheduler, the first two losses are equal, because the optimizer's own state includes the
# learning rate of its next step. So an equal first loss proves little.

# %% [markdown]
# ### Exercise 8.1 · Save and restore the training state
#
# *Difficulty 3 of 5 · 20 minutes · target: three kills, and all losses equal to the last bit*
#
# | Attribute of a `job` | What it is |
# |:--|:--|
# | `.tensors()` | name → parameter, shard or buffer of this rank; no copies |
# | `.optimizer`, `.scheduler` | each has `state_dict()` and `load_state_dict(...)` |
# | `.data.epoch`, `.data.position` | the epoch sets the order of the rows; position counts the epoch's batches so far |
# | `.step` | the number of finished steps |

# %% [markdown]
# Dropout uses torch's random generator, on a GPU the GPU's generator. `lab.random_states()` returns the
# states of both, and `lab.set_random_states(saved)` restores them. The data loader uses Python's generator:
# `random.getstate()` and `random.setstate(saved)`. These states differ from rank to rank, so each rank
# returns its own state.

# %%
lab.set_random_states(lab.random_states())  # nothing changes: the same states again
[state.shape for state in lab.random_states()]

# %%
# Exercise 8.1: what this rank saves
def job_state(job):
    ### BEGIN SOLUTION
    state = {"tensors": job.tensors(), "optimizer": job.optimizer.state_dict(),
             "scheduler": job.scheduler.state_dict(), "step": job.step,
             "data": (job.data.epoch, job.data.position),
             "torch": lab.random_states(), "python": random.getstate()}
    return copy.deepcopy(state)
    ### END SOLUTION

# %%
# Exercise 8.1: restores the state into a new job, on the same number of ranks
def load_job_state(job, state):
    ### BEGIN SOLUTION
    for name, tensor in job.tensors().items():
        tensor.copy_(state["tensors"][name])
    job.optimizer.load_state_dict(state["optimizer"])
    job.scheduler.load_state_dict(state["scheduler"])
    job.data.epoch, job.data.position = state["data"]
    job.step = state["step"]
    lab.set_random_states(state["torch"])
    random.setstate(state["python"])
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Go through one training step line by line. Which values does it read that an earlier step has changed?
# And after `job_state` has returned, which tensors of your dictionary will the optimizer change in place?
#
# You need one dictionary: copies of the tensors, two state dicts, three numbers, and the states of two
# random generators. Loading fills the tensors in place. It restores the random generators last.
#
# </details>

# %% [markdown]
# The check writes each rank's state with `torch.save`. It trains with DDP, with FSDP2 and with your ZeRO-3
# from notebook 03. It kills a rank with SIGKILL in a random step, and starts new ranks, which have only the
# files. The check runs on the CPU.

# %%
zero3 = lab.your_zero3()
lab.check_job_state(job_state, load_job_state, zero3)

# %%
lab.show_resumed(job_state, load_job_state)

# %% [markdown]
# **Notice:** with your state the difference is exactly zero.
#
# Without the moments, the first loss after the restart is equal too, and the upper curve alone does not
# show that anything is missing.
#
# Equal bits also require sums in the same order. DDP rebuilds its buckets after the first backward pass, so
# on 3 ranks a resumed job could differ in the last bit. Therefore this job runs two passes before it starts.

# %% [markdown]
# ## Resharding: a different world size
#
# A host with one of four ranks is lost, and three ranks are left. The checkpoint has four shards of each ZeRO-3 flat parameter;
# now three ranks must load it. The root's flat parameter has 3,434 elements (the vocabulary is 101):

# %%
for ranks in (4, 2, 3, 6):
    length = -(-3434 // ranks)
    print(f"{ranks} ranks: shards of {length}, {ranks * length - 3434} of padding at the end")

# %% [markdown]
# What can still be equal? The **global batch** stays the same: 12 rows, which are 3 for each of 4 ranks, or 4
# for each of 3. So the gradient is the mean over the same rows, added in another order. The losses are equal
# up to rounding.
#
# Random numbers cannot be resharded: four streams do not become three. With dropout the job would learn
# equally well, but with different losses. So this job has no dropout.

# %% [markdown]
# For DDP and FSDP2, torch's distributed checkpoint (DCP) does the resharding, as in notebook 04. These two
# functions are given. The progress state is the same on all ranks: scheduler, epoch, position and step.
# `job.progress_state()` returns it, and `job.load_progress_state(...)` restores it.

# %%
def save_dcp(job, folder):
    """Saves DDP or FSDP2: all ranks write into one folder."""
    model, optimizer = get_state_dict(job.module, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "progress": job.progress_state()}
    dcp.save(state, checkpoint_id=folder)

# %%
def load_dcp(job, folder):
    """Loads into a new job, on any number of ranks."""
    model, optimizer = get_state_dict(job.module, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "progress": job.progress_state()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(job.module, job.optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
    job.load_progress_state(state["progress"])

# %% [markdown]
# Your own ZeRO-3 does not use DCP. It has one flat parameter, a `unit`, for each layer, and one for the root.
# Each rank saves its shard of every unit, and the same slices of Adam's two moments. It also saves the frozen
# parameters and the buffers, which are replicated on all ranks.

# %%
def save_shards(job, folder):
    """Saves ZeRO-3: each rank writes a file with its own shards."""
    units = [{"shard": unit.shard.detach(), **job.optimizer.state[unit.shard]}
             for unit in job.module.units]
    replicated = {name: tensor for name, tensor in job.tensors().items() if "shard" not in name}
    state = {"units": units, "replicated": replicated, "progress": job.progress_state()}
    torch.save(state, folder / f"rank_{dist.get_rank()}.pt")

# %% [markdown]
# ### Exercise 8.2 · Reshard a flat parameter
#
# *Difficulty 3 of 5 · 15 minutes · target: from 4 ranks to 2, 3 and 6, and from 2 to 4; parameters and
# moments equal to the last bit*
#
# `old_shards` lists the shards of all ranks that saved, in the order of their ranks. Return this rank's new
# shard. It has `unit.shard_elements` elements on every rank; the flat parameter has `unit.elements` without
# padding. The moments are resharded by the same function.

# %%
# Exercise 8.2: this rank's new shard of a flat parameter, from all old shards
def reshard(unit, old_shards):
    ### BEGIN SOLUTION
    unpadded = torch.cat(old_shards)[:unit.elements]
    padded = unpadded.new_zeros(dist.get_world_size() * unit.shard_elements)
    padded[:unit.elements] = unpadded
    begin = dist.get_rank() * unit.shard_elements
    return padded[begin:begin + unit.shard_elements].clone()
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Where does an old shard end, and where does the data of all old shards end? Only the last shard has padding
# at its end, and another number of ranks needs another padding.
#
# Concatenate the old shards, and drop what is beyond `unit.elements`. Then add zeros until the length is the
# world size times `unit.shard_elements`. Return a copy of your own slice.
#
# </details>

# %%
def load_shards(job, folder):
    """Loads ZeRO-3's files into a new job, on any number of ranks."""
    files = [folder / f"rank_{old}.pt" for old in range(len(list(folder.iterdir())))]
    saved = [torch.load(file) for file in files]
    for number, unit in enumerate(job.module.units):
        parts = [each["units"][number] for each in saved]
        own = {name: reshard(unit, [part[name] for part in parts])
               for name in ("shard", "exp_avg", "exp_avg_sq")}
        unit.shard.data.copy_(own.pop("shard"))
        job.optimizer.state[unit.shard] = {"step": parts[0]["step"], **own}
    for name, tensor in saved[0]["replicated"].items():
        job.tensors()[name].copy_(tensor)
    job.load_progress_state(saved[0]["progress"])

# %%
lab.check_other_ranks(save_dcp, load_dcp, save_shards, load_shards, zero3)

# %%
lab.show_other_ranks(save_shards, load_shards, zero3)

# %% [markdown]
# On 4 ranks the losses are equal to the bit. On other numbers of ranks the loaded values are equal
# too, but the sums have another order, so the losses differ in their last digits.
#
# DCP has one trap. If a job has gradients when it loads, for example after a trial step, `get_state_dict`
# assumes that the optimizer has already made steps. Then it allocates no moments for DCP to fill:

# %%
lab.show_stale_gradient(save_dcp, load_dcp)

# %% [markdown]
# Nothing is raised: the moments are lost, and the first loss is equal all the same. So call `zero_grad()`
# before loading, and compare more than one loss.

# %% [markdown]
# ## Atomic checkpoints
#
# A job can also fail while it saves. If it overwrites its last checkpoint, then half of the new one exists and
# nothing of the old one. BLOOM's 2.3 TB took 40 seconds to save, every three hours; Llama 3's training was
# interrupted 419 times in 54 days. One job with both numbers:

# %%
share = 40 / (3 * 3600 + 40)  # of the time the job saves
print(f"interruptions during a save, in 54 days: {419 * share:.1f}")
print(f"probability of at least one: {1 - (1 - share) ** 419:.0%}")

# %% [markdown]
# So a file must be replaced atomically: completely or not at all.
#
# | Call | What it does |
# |:--|:--|
# | `os.replace(source, target)` | renames a file in one atomic step; `target` then has the new content |
# | `file.flush()` | passes the bytes in Python's buffer to the operating system |
# | `os.fsync(descriptor)` | returns when the bytes of a file, or the names in a folder, are on the disk |
#
# Without `fsync`, a power failure can lose what was written.

# %% [markdown]
# ### Exercise 8.3 · Atomic write
#
# *Difficulty 2 of 5 · 15 minutes · target: 30 kills during a write, and a complete version after each*
#
# When the function returns, the new content and its name are on the disk. At any kill, the file has the
# complete old or the complete new content. If writing or syncing raises OSError because the disk is full, the
# caller gets this error, the old version stays, and no temporary file is left.

# %%
# Exercise 8.3: `path` has the old content or the new one, never a part of it
def atomic_write(path, data):
    ### BEGIN SOLUTION
    temporary = f"{path}.part"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(Path(path).parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    ### END SOLUTION

# %%
lab.check_atomic_write(atomic_write)

# %% [markdown]
# A kill is not the only danger. A disk returns wrong bits, a file is truncated, another one is missing. Here
# one bit of a checkpoint is flipped. What does `torch.load` say?

# %%
data = bytearray(lab.to_bytes({"weight": torch.ones(1000)}))
data[len(data) // 2] ^= 0x10
torch.load(io.BytesIO(data))["weight"].unique().tolist()

# %% [markdown]
# No error is raised, and one weight has another value.
#
# So a checkpoint needs a **digest** of each file: a short value that any other content would not have. Here it
# is SHA-256, `hashlib.sha256(data).hexdigest()`.

# %% [markdown]
# ### Exercise 8.4 · The newest valid checkpoint
#
# *Difficulty 4 of 5 · 25 minutes · target: found in 16 cases of damage, and after kills of a job of two
# ranks*
#
# The checkpoint of step 12 is the folder `step_12`. In it, each rank writes its own state to `rank_0.pt`,
# `rank_1.pt` …; `lab.to_bytes(state)` returns what `torch.save` would write.

# %% [markdown]
# The **manifest**, `manifest.json`, lists the digests of these files. It is written last: without a manifest
# there is no checkpoint. When `save_checkpoint` returns on any rank, all files must exist.

# %%
# Exercise 8.4: on every rank, with its own state
def save_checkpoint(folder, step, state, group):
    ### BEGIN SOLUTION
    path, rank = Path(folder, f"step_{step}"), dist.get_rank(group)
    path.mkdir(parents=True, exist_ok=True)
    data = lab.to_bytes(state)
    atomic_write(path / f"rank_{rank}.pt", data)
    digests = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, hashlib.sha256(data).hexdigest(), group=group)
    if rank == 0:
        atomic_write(path / "manifest.json", json.dumps(digests).encode())
    dist.barrier(group)
    ### END SOLUTION

# %% [markdown]
# The search runs in one process. The next function judges one checkpoint. It returns a sentence that names the
# bad file, or None if the checkpoint is valid.

# %%
# Exercise 8.4: None, or what is wrong with the checkpoint in the folder `path`
def what_is_wrong(path):
    ### BEGIN SOLUTION
    try:
        digests = json.loads((path / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        return f"manifest.json cannot be read ({type(error).__name__})"
    for rank, digest in enumerate(digests):
        file = path / f"rank_{rank}.pt"
        if not file.exists():
            return f"{file.name} is missing"
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            return f"{file.name} is not what was saved"
    return None
    ### END SOLUTION

# %% [markdown]
# The next function asks yours about each folder, from the newest step on. As text, step_9 comes after step_10;
# therefore it compares numbers.

# %%
def newest_checkpoint(folder):
    """(path or None, {name of a newer folder: what is wrong with it})"""
    paths = Path(folder).glob("step_*")
    problems = {}
    for path in sorted(paths, key=lambda path: int(path.name[5:]), reverse=True):
        problem = what_is_wrong(path)
        if problem is None:
            return path, problems
        problems[path.name] = problem
    return None, problems

# %% [markdown]
# <details><summary>Hint</summary>
#
# Rank 0 writes the manifest, but each rank knows only the digest of its own file: `all_gather_object`
# collects them. After that call, what does rank 0 know about the other ranks' files? And what do the other
# ranks know about the manifest when they return?
#
# For the search: which errors does reading the manifest raise if it is missing, empty or truncated?
#
# </details>

# %%
lab.check_checkpoints(save_checkpoint, newest_checkpoint)

# %%
lab.show_damage(save_checkpoint, newest_checkpoint)

# %% [markdown]
# Every bad file is named, and an older checkpoint is used instead. If all are bad, there is none. So a job
# should keep more than one checkpoint.
#
# Now a guess. A job of two ranks saves with `torch.save` over its last files. It is killed 30 times during a
# save. How often is no valid checkpoint left?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 20
### END SOLUTION
labs.guess("8.4", "lost checkpoints in 30 kills, torch.save over the last file", my_guess)

# %%
lab.show_kills(save_checkpoint, newest_checkpoint)

# %% [markdown]
# **Notice:** with your functions no kill loses a checkpoint: until the new manifest exists, the search finds
# the previous step.
#
# `torch.save` truncates the old file first. From then until both ranks have finished, a kill leaves no valid
# checkpoint.

# %% [markdown]
# ## Asynchronous checkpointing
#
# While a rank saves synchronously, it computes nothing. Take a 70B model with 14 bytes per parameter on 1,024
# GPUs. A GPU copies 25 GB/s to its host, and the storage takes 100 GB/s from all ranks together:

# %%
size = 14 * 70e9
print(f"each rank: {size / 1024 / 1e9:.2f} GB, to the host in {1000 * size / 1024 / 25e9:.0f} ms")
print(f"all ranks, to the storage: {size / 100e9:.1f} s")

# %% [markdown]
# So the GPU needs to wait only milliseconds, until its host has a **snapshot**: a copy of the state at this
# step. A thread writes the snapshot to the storage while training continues. A snapshot needs host memory, so
# there should never be two.

# %% [markdown]
# A `ThreadPoolExecutor` runs functions in threads. Its `submit` returns a *future* at once. The future's method
# `result` waits for the thread. Then it returns what the function returned, or raises what the function
# raised.

# %%
pool = ThreadPoolExecutor(1)
future = pool.submit(math.log, 0)
try:
    future.result()
except ValueError as error:
    print("raised in the thread, raised again here:", error)

# %% [markdown]
# ### Exercise 8.5 · An asynchronous saver
#
# *Difficulty 3 of 5 · 20 minutes · target: one snapshot in memory, no save lost, every error raised*
#
# `save` returns once the state has been copied and the previous save has finished; later changes to the weights
# must not reach the file. `write(path, data)` takes the bytes of `lab.to_bytes(state)`, and may be slow.

# %% [markdown]
# `close` returns when no save is in flight; then no snapshot is left in memory. An error of `write` is raised
# once, by the next `save` or `close`.

# %%
# Exercise 8.5: save(path, state) does not wait for its own write(path, data)
class AsyncSaver:
    def __init__(self, write):
        self.write, self.pool, self.in_flight = write, ThreadPoolExecutor(1), None

    def save(self, path, state):
        ### BEGIN SOLUTION
        self.close()
        self.in_flight = self.pool.submit(self.write, path, lab.to_bytes(state))
        ### END SOLUTION

    def close(self):
        ### BEGIN SOLUTION
        future, self.in_flight = self.in_flight, None
        if future is not None:
            future.result()
        ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Three things take time: waiting for the previous save, copying the state into bytes, and writing them. Which
# of them must `save` wait for, and which may the thread do, if the weights change as soon as `save` has
# returned?
#
# One of the two methods begins with the other one. It forgets the future before it asks for the result: then an
# error is raised only once.
#
# </details>

# %%
lab.check_async_saver(AsyncSaver)

# %% [markdown]
# Now the saver runs beside a job. Two ranks train a GPT-2 under FSDP2, and each saves its shards after every
# eight steps. The disk is slowed down so that a write takes as long as five steps on every machine.
#
# Guess: how many percent of the synchronous stall remain?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION
labs.guess("8.5", "percent of the stall that asynchronous saving leaves", my_guess)

# %%
lab.show_stalls(AsyncSaver, atomic_write)

# %% [markdown]
# **Notice:** a synchronous save stalls the job until the disk has finished. Your saver and
# `torch.distributed.checkpoint.async_save` stall it only for the copy.
#
# In addition, `async_save` plans with the other ranks which of them writes what, so that another number of ranks can
# load the checkpoint. Its thread uses a separate process group: in the job's group, its collectives could be
# matched with those of the training.

# %%
lab.show_snapshot_memory(AsyncSaver)

# %% [markdown]
# **Notice:** the state has 64 MB, and so has one snapshot.
#
# A saver that copies the tensors and lets the thread serialize them needs twice as much. torch's
# `DefaultStager`, if you pass one, keeps its snapshot for the next save, which then need not allocate it again.
# %% [markdown]
# ## Second sitting · 90 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 8.6, 8.7, 8.9 |
# | **Optional** | 8.8 |
# | **In a new kernel** | run the first two code cells |
#
# You will be able to:
#
# - write a training script that `torchrun` can restart at any time;
# - say where the seconds between a failure and the next new step go;
# - choose the interval between checkpoints, and say when a formula is wrong;
# - compute the goodput of a job on 16,384 GPUs.

# %% [markdown]
# ## Elastic restart with torchrun
#
# A job that fails at night waits until somebody restarts it. How often did that happen to Llama 3's training, in
# 8 hours?

# %%
print(f"{8 * 419 / (54 * 24):.1f} failures in one night")  # 419 interruptions in 54 days

# %% [markdown]
# `torchrun` restarts a job by itself. On each host it runs as a process of its own, the **agent**, which checks
# several times a second whether its ranks are alive. When one has died, the agent stops the others, starts a new
# rendezvous of the hosts, and starts all ranks again, up to `--max-restarts` times.
#
# The new ranks know nothing of the old ones. They continue only from what your script finds in its files.

# %% [markdown]
# `elastic.py` trains a small GPT with DDP and dropout. It saves its state with DCP, which can load it on any
# number of ranks:
#
# | Call, on all ranks | What it does |
# |:--|:--|
# | `get_state_dict(module, optimizer)` | returns two dictionaries, `(model, optimizer)` |
# | `dcp.save(state, checkpoint_id=path)` | makes a folder with a file of each rank; rank 0 writes `.metadata` last |
# | `dcp.load(state, checkpoint_id=path)` | fills the tensors of `state`, a dictionary with the same keys |
# | `set_state_dict(module, optimizer, model_state_dict=..., optim_state_dict=...)` | loads both into module and optimizer |

# %% [markdown]
# Guess: a rank is killed with SIGKILL. How many seconds later has the job repeated all lost steps? It saves
# every 5 steps; a step takes about 0.1 s.

# %%
# A guess, for the second picture below
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("8.6", "seconds from a kill until all lost steps are done again", my_guess)

# %% [markdown]
# ### Exercise 8.6 · An elastic training script
#
# *Difficulty 4 of 5 · 30 minutes · target: killed five times, in steps and while it saves, on 2 ranks and on 1,
# it has the losses of the uninterrupted run*
#
# The next cell writes the file; fill in its three gaps. All ranks must load the same checkpoint, even if a
# network file system shows a new file to some of them later. Dropout must draw a different mask in each step.

# %% [markdown]
# | In `elastic.py` | What it is or does |
# |:--|:--|
# | `batches` | this rank's samples of each step, from step 0 on; the global batch does not depend on the number of ranks |
# | `take_step(step, ...)` | trains on them, and records the loss of this step |
# | `folder` | `options.checkpoints`, an existing folder |
#
# To keep the script short, it uses neither the digests of exercise 8.4 nor the `fsync` of 8.3. A production
# script needs both.

# %%
lab.write_script("elastic.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# Saving: a kill in the middle leaves an incomplete folder. Which name may it have until it is complete?
# `os.replace` renames a folder, too.
#
# Loading: which rank looks for the newest folder, and how do the others learn its number?
# `dist.broadcast_object_list([number])` replaces the list's content on all ranks but 0.
#
# Training: `islice(batches, done, options.steps)` skips the finished batches. Dropout uses torch's generator.
# What is its state in step 7 if steps 0 to 6 were not run? Which seed could each step and rank have?
#
# </details>

# %%
lab.check_elastic("elastic.py")

# %% [markdown]
# Now the script runs under `torchrun` itself. As soon as step 11 is recorded, `lab.run_with_kills` kills rank 1;
# after step 36 it kills rank 0. A picture shows the run while it lasts (15 to 30 s).

# %%
run = lab.run_with_kills("elastic.py", {11: 1, 36: 0})
run

# %%
lab.show_run(run, "elastic.py")

# %% [markdown]
# **Notice:** after each kill the job resumes from its last checkpoint.
#
# The lost steps (orange) are repeated with the same samples and the same random numbers. So the loss curve
# equals that of the uninterrupted run (wide line) to the last bit.

# %%
lab.show_restarts(run)

# %% [markdown]
# Most of the time passes while Python starts and imports torch again.
#
# The agent detects the dead process within a fraction of a second, and repeating the lost steps is short here.
# On thousands of GPUs a restart takes minutes: programs start from a network file system, process groups are
# initialized again, and terabytes are loaded.

# %% [markdown]
# Why is an environment variable set in the first printed line? By default torch 2.13 keeps the job's store over
# its restarts, and with it the addresses of dead ranks. A new rank that reads such an address fails, or waits
# until its timeout (*[pytorch issue 135712](https://github.com/pytorch/pytorch/issues/135712)*). With the
# variable, each restart has a store of its own.

# %% [markdown]
# ## Host loss and replacement
#
# When a process dies, its host's kernel closes its connections, and the other ranks notice at once. A host that
# loses power or its link closes nothing. The other ranks wait for it in a collective until the timeout:

# %%
gloo = dist.distributed_c10d.default_pg_timeout.total_seconds() / 60
nccl = 10  # minutes: c10d's default for this backend
print(f"gloo, which runs here, waits for {gloo:.0f} minutes by default, NCCL for {nccl}: "
      f"{16_384 * nccl / 60:,.0f} GPU hours on 16,384 GPUs")

# %% [markdown]
# So timeouts decide how long a failure takes. All but the first are set with `torchrun --rdzv-conf`:
#
# | What waits | Setting | Default | Here |
# |:--|:--|:--|:--|
# | a collective | `init_process_group(timeout=...)` | 30 min (NCCL 10) | 4 s |
# | a rendezvous with enough hosts, for more hosts | `last_call_timeout` | 30 s | 1 s |
# | the other hosts, until a silent host is removed | `keep_alive_interval` × `keep_alive_max_attempt` | 5 s × 3 | 1 s × 3 |
# | a host, for an answer of the store | `read_timeout` | 60 s | 5 s |

# %% [markdown]
# Your `elastic.py` runs on two hosts, as in notebook 06. All processes on host 1 are killed, and a replacement,
# host 2, starts at once. On a machine that cannot emulate hosts, the cells say so.

# %%
refused = lab.lose_host("elastic.py", lost="processes")
lab.show_hosts(refused)

# %% [markdown]
# Whether the replacement can join depends on the version of torch. Yours did this:

# %%
lab.show_refusal(refused)

# %% [markdown]
# Now the same with that variable, and with a worse failure: the link of host 1 is cut, and no other host is told.
# Host 0 continues alone from the last checkpoint until host 2 joins. At the end all processes on host 0 are
# killed, and with them the store of the rendezvous.

# %%
replaced = lab.lose_host("elastic.py", lost="link",
                         environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
lab.show_hosts(replaced)

# %%
lab.show_host_restarts(replaced)

# %% [markdown]
# **Notice:** a cut link is detected by the timeout of a collective; a dead process is detected at once.
#
# The repeated steps had the same loss on one host as on two. A host that joins restarts all ranks: a rendezvous,
# a start and a load.
#
# Without host 0, host 2 ended too: the store is a **single point of failure**. Then a scheduler must start the
# job again, from the checkpoint.

# %% [markdown]
# ## The checkpoint interval
#
# A checkpoint that is never loaded costs the time to write it. A missing checkpoint costs all work since the last
# one. Checkpoints of large models are large, 14 bytes per parameter: bf16 parameters, their fp32 copy, and Adam's
# two moments in fp32.

# %%
lab.show_checkpoint_sizes()

# %% [markdown]
# (The 405B row at 2 TB/s is Llama 3's storage, section 3.3.1 of its
# *[report](https://arxiv.org/abs/2407.21783)*.)
#
# Failures are not rare. The **mean time between failures** (MTBF) of a job is inversely proportional to the
# number of its GPUs, if GPUs fail independently: a failure of any GPU ends the job.

# %%
lab.show_failure_rates()

# %% [markdown]
# The sources are Llama 3's *[report](https://arxiv.org/abs/2407.21783)* (section 3.3.4); Meta's
# *[report](https://arxiv.org/abs/2410.21680)* on its research clusters, which measured jobs of 1,024 GPUs and
# projects 16,384; and *[OPT-175B's](https://arxiv.org/abs/2205.01068)* (section 2.5), with 35 manual and at least
# 70 automatic restarts in two months.

# %% [markdown]
# Why is a GPU of the same clusters 3.6 times more reliable in the projection? The projection uses the failures of
# *hosts*: 6.5 in 1,000 days of one host, which has 8 GPUs.

# %%
for gpus in (1024, 16_384):
    hours = 24 / (6.5 / 1000 * gpus / 8)
    print(f"{gpus:6,} GPUs: from the failure rate of hosts, a failure every {hours:.1f} h")

# %% [markdown]
# So the projection of 1.8 h follows from the failures of hosts alone. But the measured jobs of 1,024 GPUs failed
# every 7.9 h, not every 28.8 h, because a job also ends for reasons other than a host. Therefore measure the MTBF
# of your own jobs.

# %% [markdown]
# A job computes for an interval, saves, and repeats this until its work is done. The last interval may be shorter,
# and its work is saved too. A failure loses everything since the last finished save. Then follows a restart,
# during which the job may fail again.

# %% [markdown]
# ### Exercise 8.7 · Wall time with failures
#
# *Difficulty 3 of 5 · 20 minutes · target: right to the minute, whenever failures come*
#
# Simulate such a job from event to event. It computes for `interval`, saves for `save`, and restarts for
# `restart`. The iterable `gaps` gives the time to the first failure, and then the time from each failure to the
# next; it may be infinite. Return the time from the start to the end of the last save.

# %%
# Exercise 8.7: wall time of a job; all times in the same unit
def wall_time(work, interval, save, restart, gaps):
    ### BEGIN SOLUTION
    gaps, clock, done, waiting = iter(gaps), 0.0, 0.0, 0.0
    until_failure = next(gaps, math.inf)
    while done < work:
        piece = min(interval, work - done)
        needed = waiting + piece + save
        if needed <= until_failure:
            clock, until_failure = clock + needed, until_failure - needed
            done, waiting = done + piece, 0.0
        else:
            clock, waiting = clock + until_failure, restart
            until_failure = next(gaps, math.inf)
    return clock
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two events can come next: the failure, or the end of restart, work and save. What does the clock show after each
# of them, how much work is saved, and how long is it until the next failure?
#
# Keep four numbers: the clock, the saved work, the restart time still to come (0 at the start), and the time until
# the next failure. Each iteration of a loop is one of the two events.
#
# </details>

# %%
lab.check_wall_time(wall_time)

# %% [markdown]
# Guess: a save takes 5 minutes, a restart 10, and a failure comes every 6 hours. How many minutes should the job
# compute between two saves?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 57
### END SOLUTION
labs.guess("8.7", "minutes between two saves, a failure every 6 hours", my_guess)

# %% [markdown]
# The picture compares your function with formulas, over 5,000 failures at each point. With a save of δ and a mean
# time between failures M, Young's interval is √(2δM). Daly (2006) added terms for saves that are not short
# compared with M. His closed form gives the expected wall time.

# %%
lab.show_intervals(wall_time)

# %% [markdown]
# **Notice:** the minimum is flat: half or twice the optimal interval costs about the same.
#
# Young's formula is good enough until a save takes a third of the time between two failures.

# %% [markdown]
# Daly's optima for these three are 117, 57 and 9.1 minutes. How exact are formulas for the wall time itself? With an
# interval τ and a restart R, the first-order approximation is 1 + δ/τ + (τ/2 + R)/M: saves, half an interval lost
# per failure, and a restart.

# %%
lab.show_formulas(wall_time)

# %% [markdown]
# While failures are independent, the closed form is within 1 % of your wall time. The first order leaves out
# failures during saves, restarts and repeated work. Where failures are frequent, it predicts only about half of
# the time.

# %% [markdown]
# Both formulas assume independent failures. Real failures come in clusters (Schroeder and Gibson, 2006): a broken
# switch fails again, and a long quiet period follows. With the same mean time between failures:

# %%
lab.show_clusters(wall_time)

# %% [markdown]
# Clustered failures cost less, because more work fits between the clusters.
#
# If they are very frequent, the best interval is longer than Daly's, but Daly's is close to the minimum.

# %% [markdown]
# ## Optional: causes of interruptions
#
# In 54 days Llama 3's training on 16,384 GPUs had 419 unexpected interruptions. Table 5 of the
# *[report](https://arxiv.org/abs/2407.21783)* gives a count and a percentage for each cause:

# %%
lab.show_interruptions()

# %% [markdown]
# ### Exercise 8.8 · Optional: a misprint in a published table
#
# *Difficulty 1 of 5 · 5 minutes · target: the row of Llama 3's table, and those of twelve other tables*
#
# One percentage does not match its count. `misprint(causes, total)` returns three values: the cause's name, the
# percentage that its count gives, and the count that its percentage gives.

# %%
# Exercise 8.8: the row whose two numbers contradict each other
def misprint(causes, total):
    ### BEGIN SOLUTION
    row = max(causes, key=lambda cause: abs(100 * cause.count / total - cause.percent))
    return row.name, 100 * row.count / total, row.percent * total / 100
    ### END SOLUTION

# %%
lab.check_misprint(misprint)

# %% [markdown]
# Which of the two is right? The report says that GPUs and their memory caused 58.7 % of all.

# %%
lab.show_readings(misprint)

# %% [markdown]
# Each reading agrees with one more printed number, and contradicts another. With the count 148 the counts sum to
# 419; with 30.1 % GPUs cause 58.7 %. The report alone does not decide it.

# %% [markdown]
# ## Goodput
#
# **Goodput** is the fraction of wall time spent on work that was not lost. Llama 3's
# *[report](https://arxiv.org/abs/2407.21783)* says "higher than 90 %". Which goodput do failures and saves allow?
# Two functions give Daly's optimal interval and his expected wall time, for example with a save of 5 minutes, a
# restart of 10, and a failure every 6 hours:

# %%
interval = lab.daly(mtbf=360, save=5)
interval, lab.expected_wall(work=1, interval=interval, save=5, restart=10, mtbf=360)

# %% [markdown]
# ### Exercise 8.9 · Checkpoint interval and goodput
#
# *Difficulty 3 of 5 · 15 minutes · target: within 0.2 % of the best goodput*
#
# Given are the number of GPUs, the MTBF of one GPU in hours, the bytes of a checkpoint, the storage's bytes per
# second, and the seconds of a restart. Return a dictionary with `"interval"`, the seconds between two saves, and
# `"goodput"`.

# %% [markdown]
# Assume synchronous saving: all GPUs wait until the storage has the complete checkpoint. With the asynchronous
# saver of exercise 8.5 they no longer wait for the storage, but only for the copy into host memory, which takes
# milliseconds. The picture below shows both.

# %%
# A guess, for exercise 8.9
### BEGIN SOLUTION
my_guess = 92
### END SOLUTION
labs.guess("8.9", "percent kept by 16,384 GPUs whose 405B checkpoint goes to 2 TB/s", my_guess)

# %%
# Exercise 8.9: the interval between two saves, and the goodput
def save_plan(gpus, gpu_hours, checkpoint_bytes, bandwidth, restart):
    ### BEGIN SOLUTION
    mtbf = 3600 * gpu_hours / gpus  # seconds
    save = checkpoint_bytes / bandwidth
    interval = lab.daly(mtbf, save)
    wall = lab.expected_wall(1, interval, save, restart, mtbf)
    return {"interval": interval, "goodput": 1 / wall}
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# One GPU fails every `gpu_hours` hours. How often does one of 16,384 GPUs fail? And how many seconds does it take
# to write the checkpoint?
#
# From these two numbers, one formula gives the interval. The closed form gives the wall time of any amount of work.
# Do not mix hours and seconds.
#
# </details>

# %%
lab.check_save_plan(save_plan)

# %%
lab.show_goodput(save_plan)

# %% [markdown]
# **Notice:** dashed is asynchronous saving, with one checkpoint written after the other. It needs far less
# bandwidth, because training continues during the write.
#
# With 131,072 such GPUs even asynchronous saving is not enough: at 10 TB/s more than a third of the time is lost to
# restarts of ten minutes. Then restarts must become faster, or a failure must no longer stop the whole job.

# %% [markdown]
# ## Third sitting · 65 minutes
#
# | In short | This sitting |
# |:--|:--|
# | **Core** | 8.10, 8.11 |
# | **Optional** | 8.12 |
# | **In a new kernel** | run the first two code cells; for 8.12's comparison, those of exercise 8.6 too |
#
# You will be able to:
#
# - find the replica whose bits differ, and say which corruption no digest can find;
# - find the rank that is slow, and say why;
# - compare elastic restart with replica groups.

# %% [markdown]
# ## Silent data corruption
#
# Six of the 419 unexpected interruptions of Llama 3's training were **silent data corruption**: a chip computed a
# wrong number, or memory returned another bit than was stored, and no error was raised. What one bit does to a
# float32 depends on its position: bits 0 to 22 are the mantissa, 23 to 30 the exponent, 31 is the sign.

# %%
for bit in (0, 20, 26, 30, 31):
    weight = torch.tensor([0.01])
    lab.flip_bit(weight, 0, bit)
    print(f"bit {bit:2}: 0.01 becomes {weight.item():.8g}")

# %% [markdown]
# Four replicas train under DDP, and one bit of one weight flips in one of them. Guess: for how many of the 32 bits
# does the mean loss of the next steps change by more than it differs from batch to batch?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 8
### END SOLUTION
labs.guess("8.10", "of 32 bits that the loss shows", my_guess)

# %% [markdown]
# After every step, all DDP replicas have the same bits: the same start, the same averaged gradients, the same
# arithmetic. A replica with other bits is corrupt. To find it, ranks need not send parameters: a digest of each
# tensor is enough. It must be a digest of the *bits*, because -0.0 equals 0.0, and NaN does not equal itself.

# %%
zero = torch.tensor([0.0])
lab.tensor_bytes(zero), lab.tensor_bytes(-zero), zero == -zero  # the bits of this rank's shard

# %% [markdown]
# ### Exercise 8.10 · Find the corrupt replica
#
# *Difficulty 3 of 5 · 20 minutes · target: any bit of any tensor, for at most 400 bytes a tensor and rank*
#
# Return the same dictionary on every rank of `group`: the name of each parameter or buffer that differs, and the
# list of ranks whose digest is not the majority's. Without a majority (more than half) nobody can say who is right:
# then the list is empty. `dist.get_process_group_ranks(group)` lists the group's global ranks.

# %%
# Exercise 8.10: {name: ranks that differ}
def find_corrupt(module, group):
    ### BEGIN SOLUTION
    named = [*module.named_parameters(), *module.named_buffers()]
    own = {name: hashlib.sha256(lab.tensor_bytes(tensor)).hexdigest() for name, tensor in named}
    ranks, found = dist.get_process_group_ranks(group), {}
    everyone = [None] * len(ranks)
    dist.all_gather_object(everyone, own, group=group)
    for name in own:
        digests = [each[name] for each in everyone]
        usual, count = Counter(digests).most_common(1)[0]
        odd = [rank for rank, digest in zip(ranks, digests) if digest != usual]
        if odd:
            found[name] = odd if 2 * count > len(ranks) else []
    return found
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# What does each rank need from the others to reach the same verdict? It needs one digest of each tensor of each
# rank. Rank 0 may be the corrupt one, so it is no reference.
#
# Make a dictionary of this rank's digests, buffers included. Gather those of all ranks. Then, for each name, count
# how often each digest occurs.
#
# </details>

# %%
lab.check_find_corrupt(find_corrupt)

# %%
lab.show_flips(find_corrupt)

# %% [markdown]
# **Notice:** the loss reveals only one bit, which makes the weight 2¹²⁸ times as large.
#
# After that flip the loss is NaN at once, and the averaged gradients carry NaN to all replicas, which are then equal
# again. After any other flip, training continues as if nothing had happened, and the replica stays different. So
# compare digests often.

# %% [markdown]
# That was a bit of a parameter. A bit of a gradient can flip too, but gradients are averaged. Does it matter whether
# the bit flips before or after the all-reduce?

# %%
lab.show_gradient_flips(find_corrupt)

# %% [markdown]
# If it flips before the all-reduce, all replicas get the same wrong gradient: they are equal, and all wrong. The norm
# of each rank's own gradient reveals a high bit. A low bit is found only if another rank computes the same gradient
# again. That costs a second forward and backward, so it is done only for some steps.

# %% [markdown]
# And under FSDP? Each shard exists only once, so there is no replica to compare it with. But parameters must not
# change between two optimizer steps. So a rank computes a digest of its own shard after a step, and again before the
# next step.

# %%
lab.show_layouts(find_corrupt)

# %% [markdown]
# A shard's own digest finds corruption in memory, but no number that was computed wrongly. HSDP has replicas again:
# your function runs over the group of ranks that hold the same shard. But with two replicas it can only say that
# they differ.

# %% [markdown]
# ## Stragglers
#
# A **straggler** does not fail; it is just slow. But a step ends only when the last rank's gradients have arrived, so
# one slow GPU of 16,384 slows down the whole job. Here one of three ranks begins to compute ten times as much as the
# others. Guess: by how many percent do all ranks' steps become longer?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION
labs.guess("8.11", "percent longer steps of all ranks, with one slow rank of three", my_guess)

# %% [markdown]
# Each rank measures its own steps. `timings[rank][step]` has three times in seconds: `.data`, until the rank has its
# batch; `.compute`; and `.collectives`, which is waiting and transfer together. These are medians at the end of a
# recorded run:

# %%
lab.show_step_seconds()

# %% [markdown]
# **Notice:** all ranks' steps are about equally long, so the length of a step does not identify the slow rank.
#
# The slow rank spends the *shortest* time in collectives, because the other ranks wait there for it.

# %% [markdown]
# ### Exercise 8.11 · Find the straggler
#
# *Difficulty 4 of 5 · 30 minutes · target: 90 synthetic jobs on 2 to 16 ranks, and recorded ones*
#
# Return `(rank, cause, since)`. The cause, `"compute"`, `"data"` or `"link"`, makes every step from `since` to the
# end longer by a tenth of a step or more, for at least five steps. The first ten steps are healthy. A slow link has
# the rank None. Return None if nobody is slow, or if all ranks compute longer.

# %% [markdown]
# Timings have outliers. `lab.smooth` takes the median of five neighbours: an outlier disappears, and a real change
# stays where it is.

# %%
lab.smooth([1, 1, 9, 1, 1, 1, 5, 5, 5, 5])

# %%
# Exercise 8.11: (rank, cause, first slow step), or None
def find_straggler(timings):
    ### BEGIN SOLUTION
    usual = median(step.data + step.compute + step.collectives for step in timings[0])
    extra = {}
    for cause in ("compute", "data"):
        seconds = [[getattr(step, cause) for step in own] for own in timings]
        for rank, own in enumerate(seconds):
            others = zip(*seconds[:rank], *seconds[rank + 1:])
            extra[rank, cause] = [mine - median(same) for mine, same in zip(own, others)]
    least = [min(step.collectives for step in same) for same in zip(*timings)]
    extra[None, "link"] = [each - median(least[:10]) for each in least]
    for (rank, cause), seconds in extra.items():
        quiet = [at for at, late in enumerate(lab.smooth(seconds)) if late < usual / 10]
        since = max(quiet, default=-1) + 1
        if since <= len(seconds) - 5:
            return rank, cause, since
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each suspect, make one list: by how many seconds it made each step longer. Compare a rank with the other ranks
# in the same step. Compare the link with its own first steps, using the rank that waits least: if even that rank is
# in collectives longer, no rank is waited for.
#
# Smooth the list. The last step with less than a tenth of a usual step is the last healthy one.
#
# </details>

# %%
lab.check_find_straggler(find_straggler)

# %%
lab.show_stragglers(find_straggler)

# %% [markdown]
# The slow rank's line rises above and falls below, for slow computing and slow data alike. With a slow link only the
# lower lines rise, on all ranks. These seconds do not say which link is slow: notebook 06 measures one link after the
# other.

# %% [markdown]
# ## Optional: replica groups with torchft
#
# When a few of 16,384 ranks fail, elastic restart stops all others, each time. **torchft**, a library of the PyTorch
# project, partitions the job into **replica groups**. Each group has a full replica of the model, sharded with FSDP
# inside if it is large, and a launch of its own. Groups share only the all-reduce of gradients. So the failure of
# one group does not stop the others.

# %% [markdown]
# A small program, the **lighthouse**, decides at each step which groups take part: the **quorum**. Each group sends it
# heartbeats. Two objects in your training loop are torchft's:
#
# | Call | What it does |
# |:--|:--|
# | `optimizer.zero_grad()` | asks for the quorum of this step; if it has changed, makes a new process group |
# | `manager.allreduce(p.grad)` | averages over the quorum; never raises: an error marks the step as failed |
# | `optimizer.step()` | updates only if the step has not failed; otherwise the step is repeated |

# %% [markdown]
# A group that joins has old parameters, so it **heals**: it fetches the state of another group over HTTP, with that
# group's `state_dict` and its own `load_state_dict`. It reads no checkpoint.
#
# Below each group has one rank, and `torchrun` would start this function. (torchft also wraps DDP, but the wrapper of
# version 0.2.0, which is pinned here, fails on gloo when another group dies during its all-reduce.
# *[Version 0.3.0](https://github.com/meta-pytorch/torchft/releases/tag/v0.3.0)* fixed that.)

# %%
def train_replica(name):
    from torchft import Manager, Optimizer, ProcessGroupGloo
    job = lab.ReplicaJob()  # a small model and its AdamW
    manager = Manager(ProcessGroupGloo(), job.load_state_dict, job.state_dict,
                      min_replica_size=1, replica_id=name)
    optimizer = Optimizer(manager, job.optimizer)
    while job.should_continue(manager):
        optimizer.zero_grad()
        x, y = job.next_batch(manager)
        loss = torch.nn.functional.cross_entropy(job.model(x), y)
        loss.backward()
        for work in [manager.allreduce(p.grad) for p in job.model.parameters()]:
            work.wait()
        optimizer.step()
        job.record_step(manager, loss)
    return job.model

# %% [markdown]
# Now group 1 is killed, and a replacement starts 2.5 seconds later. A group counts as dead after 2 s without a
# heartbeat here (`--heartbeat_timeout_ms`, by default 5000). Guess: for how many seconds does nobody train?

# %%
# A guess, for the picture below: a mark on the row of group 0
### BEGIN SOLUTION
my_guess = 2.5
### END SOLUTION
labs.guess("8.12", "seconds in which nobody trains", my_guess)

# %%
replicas = lab.run_replicas(train_replica)
lab.show_replicas(replicas)

# %% [markdown]
# **Notice:** group 0 was not restarted.
#
# It waited until the lighthouse had removed group 1, and continued alone with the parameters that it had: no
# finished step was lost. The replacement begins with a high loss, because its own parameters are new; at the next
# step it has group 0's. In the end both groups are equal:

# %%
lab.show_digests(replicas)

# %% [markdown]
# What did this failure cost, compared with the restarts of exercise 8.6? Time in which half of the job trains counts
# half.

# %%
lab.show_time_lost(replicas, run)

# %% [markdown]
# Here torchft gains little or nothing, because this job of two ranks restarts in seconds. A large job needs minutes,
# and waits for all of its hosts. The next exercise shows where the two methods diverge.

# %% [markdown]
# While a group is missing, a step has fewer samples: its gradient is noisier, and the learning rate is not adapted.
# torchft also needs at least two full replicas of the model, and the memory for them. The lighthouse is a single
# point of failure: without it there is no quorum, and all groups stop. It is a small program, so it rarely fails; but
# a checkpoint on disk is still needed.

# %% [markdown]
# ### Exercise 8.12 · Goodput of replica groups
#
# *Difficulty 4 of 5 · 20 minutes · target: 41 jobs, exactly*
#
# `failures` lists (time, group), sorted by time. After each failure, nobody trains for `wait`, and that group is
# missing for `restart`; if it fails again meanwhile, its restart begins again. While n of `groups` train, the job
# makes n/`groups` of its progress. Return the fraction of the work that is done from 0 to `end`. Ignore saves.

# %%
# Exercise 8.12: the goodput of a job of replica groups, from 0 to 1
def replica_goodput(groups, failures, wait, restart, end):
    ### BEGIN SOLUTION
    changes = {time + later for time, _ in failures for later in (0, wait, restart)}
    cuts = sorted({0, end, *(time for time in changes if time < end)})
    work = 0.0
    for begin, until in zip(cuts, cuts[1:]):
        before = [(time, group) for time, group in failures if time <= begin]
        missing = {group for time, group in before if begin < time + restart}
        if all(begin >= time + wait for time, _ in before):
            work += (until - begin) * (groups - len(missing)) / groups
    return work / end
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# At which times does the number of training groups change? Between two such times it is constant.
#
# Collect these times from all failures, sort them, and go through neighbouring pairs. For each pair: which groups
# failed less than `restart` ago, and did any group fail less than `wait` ago? Two failures of one group make one
# missing group.
#
# </details>

# %%
lab.check_replica_goodput(replica_goodput)

# %% [markdown]
# Exercise 8.9 ended with 131,072 GPUs, which fail too often for restarts of ten minutes. Here are the same failures and
# restarts, with the GPUs partitioned into replica groups. After a failure all groups wait for 10 s. One group is the
# same as elastic restart.

# %%
lab.show_replica_groups(replica_goodput)

# %% [markdown]
# Each doubling of the number of groups removes nearly half of the loss, until only the common waits are left (dashed).
# Then a shorter wait helps, and smaller groups do not.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | after a restart, only the first loss is equal | moments or random states not saved |
# | after a restart, losses are too low | samples repeated in an epoch |
# | the newest checkpoint does not load | overwritten in place |
# | restarts, no progress | interval longer than the MTBF |
# | a file has weights of two steps | no snapshot |
# | a new host joins, and all hosts fail | an old address in the store |
# | replicas diverge | a flipped bit |

# %% [markdown]
# ## I can …
#
# - name everything that a checkpoint must contain, and prove that nothing is missing
# - write a checkpoint atomically, and verify it before loading
# - load it on another number of ranks
# - save asynchronously, and predict the host memory of a snapshot
# - say where the seconds between a failure and the next new step go
# - choose the checkpoint interval, and say when a formula is wrong
# - find a corrupt replica and a straggler

# %% [markdown]
# ## What to read
#
# - Daly, *A higher order estimate of the optimum checkpoint interval*, 2006: where does √(2δM) fail?
# - Grattafiori et al., *[The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783)*, 2024, section 3.3.4: which
#   failures needed a person?
# - Zhang et al., *[OPT](https://arxiv.org/abs/2205.01068)*, 2022, section 2.5: which failures needed one here?
# - Kokolis et al., *[Revisiting Reliability](https://arxiv.org/abs/2410.21680)*, 2024: how does the MTBF fall with the
#   number of GPUs?
# - Dixit et al., *Silent Data Corruptions at Scale*, 2021: how was a faulty core found?

# %% [markdown]
# ## What comes next
#
# You have built what trains large models, and what lets a job survive failures. Take a job of your own, write down
# what you expect of its memory, its traffic and its step time, and measure. Most large models of today are
# mixtures of experts: these are in notebook 09.
