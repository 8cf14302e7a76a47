# %% [markdown]
# # 08 · Surviving failure
#
# | | |
# |:--|:--|
# | **Time** | 240 minutes in two sittings, the second from "How often to save"; 20 for the optional exercise |
# | **Needs** | any machine with 2 cores; no GPU; Linux for two hosts; torchft for the last section |
#
# With thousands of GPUs something fails every few hours. Here ranks are killed, files are damaged and
# hosts unplugged, and the loss curve goes on as if nothing had happened.

# %% [markdown]
# ## You will be able to
#
# - save the whole state of a job, and prove that a resumed run equals the uninterrupted one to the bit;
# - write checkpoints that a kill, a full disk or a flipped bit cannot spoil;
# - save without stopping the job, and restart without a person;
# - say how often a job of 16,384 GPUs should save, and what it keeps of its time.

# %%
import copy
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
# ## The whole state
#
# A job has failed, and new ranks go on from what it saved. What must that be? Below, copies of a job
# go on; each lacks one part. First a guess: all is there but the state of the learning rate's
# schedule. Which of the next losses is the first that is wrong?

# %%
# A guess, for the table below
### BEGIN SOLUTION
my_guess = 3
### END SOLUTION
labs.guess("8.1", "without the schedule, the first loss that is wrong", my_guess)

# %%
lab.show_forgotten()

# %% [markdown]
# **Notice:** without the moments the first loss is equal, without the schedule the first two are. A loss
# is computed before its update; and the optimizer, which was loaded, has the rate of its next step. So
# an equal first loss proves little.

# %% [markdown]
# ### Exercise 8.1 · The whole state
#
# *Difficulty 3 of 5 · 20 minutes · target: three kills, and all losses equal to the last bit*
#
# | of a `job` | what it is |
# |:--|:--|
# | `.tensors()` | name → parameter, shard or buffer, as this rank has it; no copies |
# | `.optimizer`, `.scheduler` | each with `state_dict()`, `load_state_dict(...)` |
# | `.data.epoch`, `.data.position` | order of the rows; batches taken of it |
# | `.step` | steps that are done |

# %% [markdown]
# Dropout draws torch's random numbers, on a GPU the GPU's: `lab.random_states()` has both, and
# `lab.set_random_states(saved)` sets them. The data draws Python's (`random.getstate()`). Each rank
# returns its own state.

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
# Exercise 8.1: a new job, on as many ranks, goes on where the other one was
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
# Go through one step in your mind: what does each line read that an earlier step has changed? And when
# the job goes on, which of the tensors in your dictionary will the optimizer change?
#
# One dictionary: copies of the tensors, two state dicts, three numbers, two states of random generators.
# Loading fills the tensors in place, and sets the random generators last.
#
# </details>

# %% [markdown]
# The check writes each rank's state with `torch.save`. It trains with DDP, FSDP2 and your ZeRO-3 of
# notebook 03, kills a rank with SIGKILL in a random step, and starts new ranks, which have only files.
# It runs on the CPU.

# %%
zero3 = lab.your_zero3()
lab.check_job_state(job_state, load_job_state, zero3)

# %%
lab.show_resumed(job_state, load_job_state)

# %% [markdown]
# **Notice:** the difference is not small, but zero. Without the moments, loss 8 is equal, too; and the
# upper curve alone would not tell anybody that something is missing.
#
# Equal bits also need sums in an equal order. DDP makes new buckets after its first pass: on 3 ranks a
# resumed job can then differ in the last bit. So the job here makes two passes before it begins.

# %% [markdown]
# ## On another number of ranks
#
# A host is lost, and 3 of 4 ranks are left. Each of 4 has a shard of ZeRO-3's flat parameters. The root
# has 3,434 elements, because the vocabulary is 101:

# %%
for ranks in (4, 2, 3, 6):
    length = -(-3434 // ranks)
    print(f"{ranks} ranks: shards of {length}, {ranks * length - 3434} of padding at the end")

# %% [markdown]
# What can be equal then? The **global batch** stays: 12 rows, 3 for each of 4 ranks, 4 for each of 3. So
# the gradient is the mean over the same rows, summed in another order: losses are equal within rounding.
#
# Random numbers cannot go on: there were four streams, and now there are three. A job with dropout
# learns as well as before, but with other losses. So this job has no dropout.

# %% [markdown]
# ### Exercise 8.2 · Saved on 4 ranks, loaded on 3
#
# *Difficulty 4 of 5 · 30 minutes · target: from 4 ranks to 2, 3 and 6, and from 2 to 4; parameters and
# moments to the last bit*
#
# First DDP and FSDP2, through DCP as in notebook 04. `lab.place_of(job)` returns schedule, epoch,
# position and step; `lab.set_place(job, place)` puts them back, with the learning rate.

# %%
# Exercise 8.2: DDP or FSDP2, all ranks into one folder
def save_dcp(job, folder):
    ### BEGIN SOLUTION
    model, optimizer = get_state_dict(job.module, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "place": lab.place_of(job)}
    dcp.save(state, checkpoint_id=folder)
    ### END SOLUTION

# %%
# Exercise 8.2: into a new job, on any number of ranks
def load_dcp(job, folder):
    ### BEGIN SOLUTION
    model, optimizer = get_state_dict(job.module, job.optimizer)
    state = {"model": model, "optimizer": optimizer, "place": lab.place_of(job)}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(job.module, job.optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
    lab.set_place(job, state["place"])
    ### END SOLUTION

# %% [markdown]
# Then your own ZeRO-3, without DCP. `job.module.units` has a flat parameter for each layer, and one for
# the root: `unit.shard` is this rank's, `unit.shard_elements` long; `unit.elements` counts all without
# padding. `job.optimizer.state[unit.shard]` has `step`, `exp_avg` and `exp_avg_sq`; in a new job it is
# empty. Each rank also has all frozen parameters and buffers: `job.tensors()` has them, beside the
# shards, whose names begin with "shard of". `lab.shard_file(folder, rank)` names a rank's file.

# %%
# Exercise 8.2: ZeRO-3, each rank its own shards
def save_shards(job, folder):
    ### BEGIN SOLUTION
    units = [{"shard": unit.shard.detach(), **job.optimizer.state[unit.shard]}
             for unit in job.module.units]
    whole = {name: tensor for name, tensor in job.tensors().items() if "shard" not in name}
    state = {"units": units, "whole": whole, "place": lab.place_of(job)}
    torch.save(state, lab.shard_file(folder, dist.get_rank()))
    ### END SOLUTION

# %%
# Exercise 8.2: this rank's new shard of a flat parameter, from all old shards
def cut_anew(unit, old_shards):
    ### BEGIN SOLUTION
    new = torch.zeros(dist.get_world_size(), unit.shard_elements)
    new.view(-1)[:unit.elements] = torch.cat(old_shards)[:unit.elements]
    return new[dist.get_rank()].clone()
    ### END SOLUTION

# %%
# Exercise 8.2: ZeRO-3, on any number of ranks
def load_shards(job, folder):
    ### BEGIN SOLUTION
    files = range(len(list(folder.iterdir())))
    saved = [torch.load(lab.shard_file(folder, old)) for old in files]
    for number, unit in enumerate(job.module.units):
        parts = [each["units"][number] for each in saved]
        own = {name: cut_anew(unit, [part[name] for part in parts])
               for name in ("shard", "exp_avg", "exp_avg_sq")}
        unit.shard.data.copy_(own.pop("shard"))
        job.optimizer.state[unit.shard] = {"step": parts[0]["step"], **own}
    for name, tensor in saved[0]["whole"].items():
        job.tensors()[name].copy_(tensor)
    lab.set_place(job, saved[0]["place"])
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Where does an old shard end, and where does the data of all of them end? Padding is at the end of the
# last one only, and another number of ranks needs another padding. What else than parameters is as long
# as a shard?
#
# For each flat parameter: join the old shards in the order of the ranks, cut off what is beyond
# `unit.elements`, add zeros, keep your own piece, as a copy. Three times: the shard and two moments.
#
# </details>

# %%
lab.check_other_ranks(save_dcp, load_dcp, save_shards, load_shards, zero3)

# %%
lab.show_other_ranks(save_shards, load_shards, zero3)

# %% [markdown]
# **Notice:** on 4 ranks again, all is equal to the bit. On others the loaded numbers are equal, but sums
# have another order: the losses differ in their last digits.
#
# One trap of DCP is left. A job may have gradients when it loads, for example because it tried a step
# before. Then `get_state_dict` takes its optimizer for one that has made steps, and makes no room for
# the moments:

# %%
lab.show_left_gradient(save_dcp, load_dcp)

# %% [markdown]
# **Notice:** nothing is raised. The moments are lost, and the first loss is equal all the same. So call
# `zero_grad()` before loading, and compare more than one loss.

# %% [markdown]
# ## Never half a checkpoint
#
# A job that fails may fail while it saves. If it writes over its last checkpoint, it then has none: half
# of the new one, and nothing of the old. BLOOM's 2.3 TB took 40 seconds, every three hours; Llama 3's
# training was interrupted 419 times in 54 days. With both numbers in one job:

# %%
share = 40 / (3 * 3600 + 40)  # of the time in which the job saves
print(f"interruptions that meet a save, in 54 days: {419 * share:.1f}")
print(f"probability of at least one: {1 - (1 - share) ** 419:.0%}")

# %% [markdown]
# So a file is replaced as a whole, or not at all. `os.replace(source, target)` renames a file: the name
# changes in one step, from the old content to the new. And a machine may lose its power: `os.fsync(number)`
# returns when the disk has a file's bytes, or a folder's names. Before it comes `file.flush()`, or Python
# still has the bytes.

# %% [markdown]
# ### Exercise 8.3 · A file that is whole
#
# *Difficulty 2 of 5 · 15 minutes · target: 30 kills while it saves, each time a whole version*
#
# When the function returns, the new content and its name are on the disk. Whenever the process is killed,
# the file has the old content or the new one. If writing or syncing raises OSError, because the disk is
# full, the caller gets that error, the old version stays, and nothing else.

# %%
# Exercise 8.3: `path` has the old content or the new one, never a part
def write_whole(path, data):
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
lab.check_write_whole(write_whole)

# %% [markdown]
# Kills are not all. A disk returns other bits than it was given, a file is cut off, one is missing. What
# does torch say to a checkpoint of which one bit is not what it was?

# %%
data = bytearray(lab.to_bytes({"weight": torch.ones(1000)}))
data[len(data) // 2] ^= 0x10
torch.load(io.BytesIO(data))["weight"].unique().tolist()

# %% [markdown]
# **Notice:** nothing. It loads, and one weight is another number. So a checkpoint needs a **digest**: a
# short number that any other content would not have. `lab.digest(data)` is SHA-256.

# %% [markdown]
# ### Exercise 8.4 · The newest whole one
#
# *Difficulty 4 of 5 · 30 minutes · target: found in 16 cases of damage, and after kills of a job of two
# ranks*
#
# Each rank writes its own state to `lab.shard_file(path, rank)`, where `path` is
# `lab.step_folder(folder, step)`, such as step_12; `lab.to_bytes(state)` makes bytes of it. A
# **manifest**, `path / lab.MANIFEST`, says what belongs to the checkpoint. It comes last: without it,
# there is no checkpoint. When the function returns, on any rank, all must be there.

# %%
# Exercise 8.4: on every rank, with its own state
def save_checkpoint(folder, step, state, group):
    ### BEGIN SOLUTION
    path, rank = lab.step_folder(folder, step), dist.get_rank(group)
    path.mkdir(parents=True, exist_ok=True)
    data = lab.to_bytes(state)
    write_whole(lab.shard_file(path, rank), data)
    digests = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, lab.digest(data), group=group)
    if rank == 0:
        write_whole(path / lab.MANIFEST, json.dumps(digests).encode())
    dist.barrier(group)
    ### END SOLUTION

# %% [markdown]
# Then the search, in one process. First one checkpoint: a sentence that names its bad file, or None where
# it is whole.

# %%
# Exercise 8.4: None, or what is wrong with the checkpoint in the folder `path`
def what_is_wrong(path):
    ### BEGIN SOLUTION
    try:
        digests = json.loads((path / lab.MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        return f"{lab.MANIFEST} cannot be read ({type(error).__name__})"
    for rank, digest in enumerate(digests):
        file = lab.shard_file(path, rank)
        if not file.exists():
            return f"{file.name} is missing"
        if lab.digest(file.read_bytes()) != digest:
            return f"{file.name} is not what was saved"
    return None
    ### END SOLUTION

# %% [markdown]
# Then all: the path of the newest whole one, or None; and a dictionary that has, for each newer one, the
# folder's name and what is wrong with it. Files of other names may be in the folder, too.

# %%
# Exercise 8.4: (path or None, what is wrong with those that are newer)
def newest_checkpoint(folder):
    ### BEGIN SOLUTION
    paths = Path(folder).glob("step_*")
    problems = {}
    for path in sorted(paths, key=lambda path: int(path.name[5:]), reverse=True):
        problem = what_is_wrong(path)
        if problem is None:
            return path, problems
        problems[path.name] = problem
    return None, problems
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# Rank 0 writes the manifest, but only each rank knows the digest of its own file: `all_gather_object`
# brings them together. After that call, what does rank 0 know of the other ranks' files? And what do the
# others know of the manifest when they return?
#
# For the search: which errors may reading the manifest raise, if it is missing, empty or cut off? The
# folders' names are text, in which step_9 comes after step_10: compare numbers.
#
# </details>

# %%
lab.check_checkpoints(save_checkpoint, newest_checkpoint)

# %%
lab.show_damage(save_checkpoint, newest_checkpoint)

# %% [markdown]
# **Notice:** every bad file is named, and an older checkpoint takes its place. Where all are bad, there is
# none: a job should keep more than one.
#
# Guess: a job of two ranks saves with `torch.save` over its last files. It is killed 30 times while it
# saves. How many times is nothing left that it could go on from?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 20
### END SOLUTION
labs.guess("8.4", "lost checkpoints in 30 kills, torch.save over the last file", my_guess)

# %%
lab.show_kills(save_checkpoint, newest_checkpoint)

# %% [markdown]
# **Notice:** with your functions no kill loses anything: until the manifest is there, the step before is
# found. `torch.save` empties the old file first, and from then on until both ranks have finished, a kill
# leaves nothing.

# %% [markdown]
# ## Saving without stopping
#
# While a rank saves, it computes nothing. A 70B model with 14 bytes for each parameter, on 1,024 GPUs; a
# GPU sends 25 GB/s to its host, and the storage takes 100 GB/s from all ranks together:

# %%
size = 14 * 70e9
print(f"each rank: {size / 1024 / 1e9:.2f} GB, to the host in {1000 * size / 1024 / 25e9:.0f} ms")
print(f"all ranks, to the storage: {size / 100e9:.1f} s")

# %% [markdown]
# So the GPU needs to stand still for milliseconds only, until the host has a **snapshot**: a copy of the
# state as it was. A thread writes it, while the job trains on. The snapshot takes memory of the host, and
# so there should be one, never two.

# %% [markdown]
# A pool runs functions in a thread. Its `submit` returns at once, with a *future*: an object whose
# method `result` waits for the thread, returns what the function returned, or raises what it raised.

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
# `write(path, data)` takes bytes, such as those of `lab.to_bytes(state)`, and may be slow. `save` returns
# when the file can no longer get other values, but not before the save before is done. `close` returns
# when nothing is in flight. What `write` raises, the next call of `save` or `close` raises, once. After
# `close` no snapshot is held.

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
# Which of these three takes time that the job must wait for: to wait for the save before, to make bytes
# of the state, to write them? Which of them may the thread do, if the weights change as soon as `save`
# has returned?
#
# One of both methods is what the other one begins with. It forgets what is in flight before it asks for
# the result: then an error is raised once.
#
# </details>

# %%
lab.check_async_saver(AsyncSaver)

# %% [markdown]
# Now beside a job: two ranks train a GPT-2 under FSDP2, and each saves its shards after every eight steps. To
# show the same everywhere, the disk is slow on purpose: a write takes as long as five steps. Guess: how
# many percent of the synchronous stall are left?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 10
### END SOLUTION
labs.guess("8.5", "percent of the stall that asynchronous saving leaves", my_guess)

# %%
lab.show_stalls(AsyncSaver, write_whole)

# %% [markdown]
# **Notice:** a synchronous save stops the job for as long as the disk needs. Yours and torch's
# `torch.distributed.checkpoint.async_save` leave the copy, and go on. `async_save` also plans with the
# other ranks which of them writes what, so that another number of ranks can load it.
#
# Its thread has a process group of its own. In the job's group, its collectives would meet the job's.

# %%
lab.show_snapshot_memory(AsyncSaver)

# %% [markdown]
# **Notice:** the state has 64 MB, and so has one snapshot. Whoever copies the tensors and lets the thread
# make bytes of them takes twice as much. torch's `DefaultStager`, if it is passed, keeps its snapshot for the
# next save, which need not allocate it again.

# %% [markdown]
# ## Restart without a person
#
# A job that failed at night waits for somebody who wakes up. How often is that, in 8 hours?

# %%
for report in lab.RATES:
    print(f"{report.name}, {report.gpus:,} GPUs: {8 / report.mtbf_hours:.1f} failures a night")

# %% [markdown]
# `torchrun` needs nobody. On each host it is a process of its own, the **agent**, which looks several
# times a second whether its ranks are alive. When one has died, the agent ends the others too, lets the
# hosts meet anew, and starts all ranks again, up to `--max-restarts` times. The new ranks know nothing
# of the old ones: what goes on is what your script finds in its files.

# %% [markdown]
# `elastic.py` trains a small GPT with DDP and dropout. Its state is saved by torch's distributed
# checkpoint, DCP, which loads on any number of ranks:
#
# | Call, of all ranks together | does |
# |:--|:--|
# | `get_state_dict(module, optimizer)` | returns two dictionaries, `(model, optimizer)` |
# | `dcp.save(state, checkpoint_id=path)` | makes a folder with a file of each rank; rank 0 writes `.metadata` last |
# | `dcp.load(state, checkpoint_id=path)` | fills the tensors of `state`, a dictionary with the same keys |
# | `set_state_dict(module, optimizer, model_state_dict=..., optim_state_dict=...)` | takes them over |

# %% [markdown]
# Guess: a rank is killed with SIGKILL. How many seconds later has the job done again what it had done
# before? A checkpoint is made every 5 steps; a step takes about a tenth of a second.

# %%
# A guess, for the second picture below
### BEGIN SOLUTION
my_guess = 2
### END SOLUTION
labs.guess("8.6", "seconds from a kill until all lost steps are done again", my_guess)

# %% [markdown]
# ### Exercise 8.6 · A script that goes on
#
# *Difficulty 4 of 5 · 30 minutes · target: killed five times, in steps and while it saves, on 2 ranks
# and on 1, it has the losses of the run that nobody killed*
#
# The next cell writes the file; fill in its three gaps. All ranks must load the same checkpoint, even
# where a network file system shows a new file to some of them later. Each step drops other activations.

# %% [markdown]
# | In `elastic.py` | is, or does |
# |:--|:--|
# | `batches` | this rank's samples of each step, from step 0 on; all ranks together have the same, however many there are |
# | `take_step(step, ...)` | trains on them, and notes the loss of this step |
# | `folder` | `options.checkpoints`, which is there |

# %%
lab.write_script("elastic.py")

# %% [markdown]
# <details><summary>Hint</summary>
#
# Saving: who is killed in the middle leaves a folder that is not whole. Under which name may it stand
# until then? `os.replace` renames a folder, too.
#
# Loading: which rank looks for the newest folder, and how do the others hear of it?
# `dist.broadcast_object_list([number])` replaces the list's content on all ranks but 0.
#
# Training: `islice(batches, done, options.steps)` leaves out the batches that are done. Dropout draws
# its numbers from torch's generator. Where does it stand in step 7 if steps 0 to 6 were not run? Which
# seed could a step have?
#
# </details>

# %%
lab.check_elastic("elastic.py")

# %% [markdown]
# Now with `torchrun` itself. As soon as step 11 is noted, `lab.run_with_kills` kills rank 1, and after step
# 36 rank 0. A picture shows it while it runs (15 to 30 s).

# %%
run = lab.run_with_kills("elastic.py", {11: 1, 36: 0})
run

# %%
lab.show_run(run, "elastic.py")

# %% [markdown]
# **Notice:** after each kill the job goes on from its last checkpoint. The steps since then (orange) are
# run again, with the same samples and the same random numbers, and so the curve over the steps is that
# of a run that nobody killed (wide), to the last bit.

# %%
lab.show_restarts(run)

# %% [markdown]
# **Notice:** the agent sees within a fraction of a second that a process has gone. Most of the time passes
# because Python starts and imports torch once more; the steps that are run again are the smaller part
# here. On thousands of GPUs it is minutes: programs start from a network disk, connections are made
# anew, and terabytes are loaded.

# %% [markdown]
# Why the variable in the first line that the cell printed? By default torch 2.13 keeps the store of the
# job over its restarts, and with it the addresses of dead ranks. A new rank that reads them before they
# are replaced fails, or waits in vain (pytorch's issue 135712). With the variable, each restart has a
# store of its own.

# %% [markdown]
# ## A host is lost, and replaced
#
# When a process dies, the kernel of its host closes its connections, and the other ranks know at once. A
# host without power, or without its link, closes nothing. The others wait for it, as long as a collective
# may wait:

# %%
gloo = dist.distributed_c10d.default_pg_timeout.total_seconds() / 60
nccl = 10  # minutes: c10d's default for this backend
print(f"gloo, which runs here, waits for {gloo:.0f} minutes by default, NCCL for {nccl}: "
      f"{16_384 * nccl / 60:,.0f} GPU hours on 16,384 GPUs")

# %% [markdown]
# So time-outs decide how long a failure takes. With `torchrun --nnodes 1:2`, these do, all but the first
# in `--rdzv-conf`:
#
# | Who waits | Setting | Default | Here |
# |:--|:--|:--|:--|
# | a collective | `init_process_group(timeout=...)` | 30 min (NCCL 10) | 4 s |
# | a rendezvous that has enough hosts, for more | `last_call_timeout` | 30 s | 1 s |
# | the others, until a silent host is out | `keep_alive_interval` × `keep_alive_max_attempt` | 5 s × 3 | 1 s × 3 |
# | a host, for an answer of the store | `read_timeout` | 60 s | 5 s |

# %% [markdown]
# Your `elastic.py` runs on two hosts, as in notebook 06. All processes on host 1 are killed, and a
# replacement, host 2, starts at once. Where this machine cannot have hosts, the cells say so.

# %%
refused = lab.lose_host("elastic.py", lost="processes")
lab.show_hosts(refused)

# %% [markdown]
# Whether the replacement gets in depends on torch. This is what yours did:

# %%
lab.why_refused(refused)

# %% [markdown]
# The same with that variable, and with the worse failure: the link of host 1 is cut, and nobody is told.
# Host 0 goes on alone, from the last checkpoint, until host 2 comes. In the end all processes on host 0
# are killed, where the store of the rendezvous is.

# %%
replaced = lab.lose_host("elastic.py", lost="link",
                         environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
lab.show_hosts(replaced)

# %%
lab.show_host_restarts(replaced)

# %% [markdown]
# **Notice:** detection is the time-out of a collective, and the end of a process. Steps that were run again
# had the same loss on one host as on two. Whoever joins restarts all: a replacement costs a rendezvous, a
# start and loading once more. And without host 0, host 2 ended too: the store is a **single point of
# failure**. Then a scheduler starts the job anew, from the checkpoint.

# %% [markdown]
# ## How often to save
#
# A checkpoint that nobody needs costs the time to write it. One that is missing costs all work since
# the last. Checkpoints of large models are large: bf16 parameters, and in fp32 a copy and Adam's two
# moments, 14 bytes for each parameter.

# %%
lab.show_checkpoint_sizes()

# %% [markdown]
# (The 405B row at 2 TB/s is Llama 3's: its report gives the storage's bandwidth in section 3.3.1.) And
# failures are not rare. The **mean time between failures** (MTBF) of a job falls with the number of its
# GPUs, because it ends when any of them fails.

# %%
for report in lab.RATES:
    print(f"{report.name}, {report.gpus:,} GPUs: a failure every {report.mtbf_hours:.1f} h, "
          f"{report.mtbf_hours * report.gpus:,.0f} h for one GPU")

# %% [markdown]
# These are from Llama 3's report (arXiv 2407.21783, section 3.3.4); from Meta's on its research clusters
# (arXiv 2410.21680), which measured jobs of 1,024 GPUs and projects 16,384; and from OPT-175B's (arXiv
# 2205.01068, section 2.5): 35 restarts by hand, and at least 70 automatic ones, in two months.

# %% [markdown]
# Why is a GPU of the same clusters 3.6 times more reliable when it is projected? The projection is from
# failures of *hosts*: 6.5 in 1,000 days of one host, which has 8 GPUs.

# %%
for gpus in (1024, 16_384):
    hours = 24 / (6.5 / 1000 * gpus / 8)
    print(f"{gpus:6,} GPUs: by the rate of hosts, a failure every {hours:.1f} h")

# %% [markdown]
# So the law holds for one cause, and gives 1.8 h; but the measured jobs of 1,024 GPUs ended every 7.9 h, not
# every 28.8. The rate of hosts does not count what else ends a job. Take the MTBF of your own jobs.

# %% [markdown]
# So a job computes for an interval, saves, and so on until its work is done; the last piece may be shorter,
# and is saved too. A failure loses everything since the last finished save. A restart follows, which may
# fail as well.

# %% [markdown]
# ### Exercise 8.7 · A job that fails
#
# *Difficulty 3 of 5 · 20 minutes · target: right to the minute, whenever failures come*
#
# Follow such a job from event to event: it computes for `interval`, saves for `save`, restarts for
# `restart`. `gaps` gives the time to the first failure, then from each failure to the next; it may never
# end. Return the time from the start to the end of the last save.

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
# Two things can happen next: the failure comes, or restart, piece and save end before it. What does the
# clock show then, what is done, and how long is it until the failure after that?
#
# Keep four numbers: the clock, what is saved, the restart that is still to come (0 at the start), and
# the time until the next failure. Each turn of a loop is one of the two events.
#
# </details>

# %%
lab.check_wall_time(wall_time)

# %% [markdown]
# Guess: saves take 5 minutes, restarts 10, and a failure comes every 6 hours. How many minutes should a
# job compute between two saves?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 57
### END SOLUTION
labs.guess("8.7", "minutes between two saves, a failure every 6 hours", my_guess)

# %% [markdown]
# Your function against formulas, for 5,000 failures at each point. With a save of δ and a mean time
# between failures M, Young's interval is √(2δM); Daly (2006) added terms for saves that are not short. His
# closed form gives the wall time itself.

# %%
lab.show_intervals(wall_time)

# %% [markdown]
# **Notice:** the least is flat. Young's formula costs nothing that matters, until a save takes a third of
# the time between two failures; and to save twice too seldom costs as much as twice too often.

# %% [markdown]
# Daly's optima for these three are 117, 57 and 9.1 minutes. How exact are formulas for the wall time itself?
# With an interval τ and a restart R, the first order is 1 + δ/τ + (τ/2 + R)/M: saves, half an interval
# lost in each failure, and a restart.

# %%
lab.show_formulas(wall_time)

# %% [markdown]
# **Notice:** the closed form is within 1 % of your wall time while failures are independent. The first order
# leaves out failures in saves, in restarts and in work that is done again: where these are frequent, it
# promises about half of the time.

# %% [markdown]
# Both take failures to be independent of each other. Real ones come in clusters (Schroeder and Gibson, 2006):
# a broken switch fails again, a long calm follows. With the same mean time between failures:

# %%
lab.show_clusters(wall_time)

# %% [markdown]
# **Notice:** clusters cost less, because much fits between them. Where failures are that frequent, the
# best interval is longer than Daly's, but Daly's is not far from the least.

# %% [markdown]
# ## What failed
#
# In 54 days Llama 3's training on 16,384 GPUs was interrupted unexpectedly 419 times. The report's table 5
# gives a count and a percentage for each cause:

# %%
for cause in lab.LLAMA_3:
    print(f"{cause.count:4} {cause.percent:5} %  {cause.name}")

# %% [markdown]
# ### Exercise 8.8 · A printed mistake
#
# *Difficulty 1 of 5 · 5 minutes · target: the row of Llama 3's table, and those of twelve other tables*
#
# One percentage does not follow from its count. `misprint(causes, total)` returns the cause's name, the
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
# Which of both is right? The report says that GPUs and their memory caused 58.7 % of all.

# %%
lab.show_readings(misprint)

# %% [markdown]
# **Notice:** either reading fits one more printed number, and contradicts another: with 148 the counts add
# up to 419, with 30.1 % GPUs cause 58.7 %. The report alone does not decide it.

# %% [markdown]
# **Goodput** is the share of the time in which work was done that was kept. Llama 3's report says "higher
# than 90 %". What could it be? `lab.young(mtbf, save)`, `lab.daly(mtbf, save)`,
# `lab.expected_wall(work, interval, save, restart, mtbf)` and your `wall_time` are there.

# %% [markdown]
# ### Exercise 8.9 · The time that a large job keeps
#
# *Difficulty 3 of 5 · 15 minutes · target: within 0.2 % of the best goodput*
#
# Given are the GPUs, the mean hours between failures of one GPU, bytes of a checkpoint, bytes per second of
# the storage, and seconds of a restart. The job saves synchronously: all GPUs wait while it writes. Return a
# dictionary with `"interval"`, the seconds between two saves, and `"goodput"`.

# %%
# A guess, for exercise 8.9
### BEGIN SOLUTION
my_guess = 92
### END SOLUTION
labs.guess("8.9", "percent kept by 16,384 GPUs whose 405B checkpoint goes to 2 TB/s", my_guess)

# %%
# Exercise 8.9: how often a job saves, and what it keeps
def save_plan(gpus, gpu_hours, checkpoint_bytes, bandwidth, restart):
    ### BEGIN SOLUTION
    mtbf, save = 3600 * gpu_hours / gpus, checkpoint_bytes / bandwidth
    interval = lab.daly(mtbf, save)
    wall = lab.expected_wall(1, interval, save, restart, mtbf)
    return {"interval": interval, "goodput": 1 / wall}
    ### END SOLUTION

# %% [markdown]
# <details><summary>Hint</summary>
#
# One GPU fails every `gpu_hours` hours. How often does one of 16,384 fail? And how many seconds take so
# many bytes?
#
# With both numbers, a formula gives the interval, and the closed form the wall time of any amount of
# work. Mind hours and seconds.
#
# </details>

# %%
lab.check_save_plan(save_plan)

# %%
lab.show_goodput(save_plan)

# %% [markdown]
# **Notice:** dashed is what an asynchronous saver keeps, whose step does not wait for the storage, and who
# writes one checkpoint after the other. It needs far less bandwidth: while it writes, the job computes.
# But with 131,072 such GPUs no storage helps, and no thread: at 10 TB/s more than a third of the time is
# lost all the same, to restarts of ten minutes. Then restarts must become faster, or failures must no
# longer end the job.

# %% [markdown]
# ## Silent corruption
#
# Six of those 419 interruptions were **silent data corruption**: a chip computed a wrong number, or memory
# gave back another bit than it was given, and nothing raised an error. What one bit does to a float32
# depends on which one it is: 0 to 22 are the mantissa, 23 to 30 the exponent, 31 is the sign.

# %%
for bit in (0, 20, 26, 30, 31):
    weight = torch.tensor([0.01])
    lab.flip_bit(weight, 0, bit)
    print(f"bit {bit:2}: 0.01 becomes {weight.item():.8g}")

# %% [markdown]
# Four replicas train under DDP, and one bit of one weight flips in one of them. Guess: after how many of
# the 32 bits does the mean loss of the next steps change by more than it changes from batch to batch?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 8
### END SOLUTION
labs.guess("8.10", "of 32 bits that the loss shows", my_guess)

# %% [markdown]
# After every step, all replicas have the same bits: same start, same averaged gradients, same arithmetic.
# A rank that has others is corrupt. To find it, nobody needs to send parameters: a digest of each tensor is
# enough. It must be of the *bits*, because -0.0 equals 0.0, and NaN does not equal itself;
# `lab.tensor_bytes(tensor)` returns those that this rank has. `dist.get_process_group_ranks(group)` lists a
# group's ranks by their numbers in the job.

# %% [markdown]
# ### Exercise 8.10 · The rank that differs
#
# *Difficulty 3 of 5 · 20 minutes · target: any bit of any tensor, for at most 400 bytes a tensor and rank*
#
# Return, on every rank of `group`, the same dictionary: the name of each tensor, parameter or buffer, in
# which they differ, and the list of ranks that do not have what more than half have. If no more than half
# agree, nobody can say who is right: then the list is empty.

# %%
# Exercise 8.10: {name: ranks that differ}
def find_corrupt(module, group):
    ### BEGIN SOLUTION
    named = [*module.named_parameters(), *module.named_buffers()]
    own = {name: lab.digest(lab.tensor_bytes(tensor)) for name, tensor in named}
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
# What does each rank need to know of the others, to say the same as they do? It is one digest for each
# tensor of each rank. And rank 0 is no better judge than the others.
#
# Make a dictionary of this rank's digests, buffers included; gather those of all ranks; then, for each
# name, count how often each digest occurs.
#
# </details>

# %%
lab.check_find_corrupt(find_corrupt)

# %%
lab.show_flips(find_corrupt)

# %% [markdown]
# **Notice:** the loss shows one bit, which makes the weight 2¹²⁸ times as large: it is NaN at once. Then the
# averaged gradients carry NaN to all replicas, which are equal again. After any other bit, training goes on as if
# nothing had happened, and the replica stays different. So compare digests often.

# %% [markdown]
# That was a parameter. A gradient is wrong on one rank, too, when a bit flips in it; but then it is
# averaged. When does it matter whether the bit flips before or after the all-reduce?

# %%
lab.show_gradient_flips(find_corrupt)

# %% [markdown]
# **Notice:** before the all-reduce, the wrong gradient goes into all replicas alike: they are equal, and all
# wrong. The norm of each rank's own gradient shows a high bit. A low one is found only if another rank
# computes the same gradient again: a second forward and backward, so done for a sample of steps at most.

# %% [markdown]
# And under FSDP? Each shard exists once; there is nothing to compare it with, except itself: from one
# step of the optimizer to the next, parameters must not change. So a rank takes a digest of its own shard
# after a step, and again before the next.

# %%
lab.show_layouts(find_corrupt)

# %% [markdown]
# **Notice:** a shard's own digest finds what memory did, but no number that was wrong when it was
# computed. HSDP has replicas again: your function runs over the group of ranks with the same shard. With
# two of them, though, it can only say that they differ.

# %% [markdown]
# ## Stragglers
#
# A **straggler** fails in nothing: it is only slow. But a step ends when the last rank's gradients have
# come, so one slow GPU of 16,384 makes a slow job of all. Here one of three ranks begins to compute ten
# times as much as the others. Guess: by how many percent do the steps of all become longer?

# %%
# A guess, for the picture below
### BEGIN SOLUTION
my_guess = 60
### END SOLUTION
labs.guess("8.11", "percent longer steps of all ranks, with one slow rank of three", my_guess)

# %% [markdown]
# Each rank measures its own steps: `timings[rank][step]` has `.data`, seconds until it had its batch,
# `.compute`, and `.collectives`, which is waiting and transfer together. At the end of a recorded run:

# %%
for rank, steps in enumerate(lab.recorded_stragglers()["slow rank"].timings):
    parts = {name: 1e3 * median(getattr(step, name) for step in steps[-10:])
             for name in ("data", "compute", "collectives")}
    print(f"rank {rank}, ms:", {name: round(each) for name, each in parts.items()},
          "together", round(sum(parts.values())))

# %% [markdown]
# **Notice:** all ranks' steps are about equally long, so the length of a step accuses nobody. The slow
# rank is in collectives for the *shortest* time: the others wait there for it.

# %% [markdown]
# ### Exercise 8.11 · Who is slow, and why
#
# *Difficulty 4 of 5 · 30 minutes · target: 90 synthetic jobs on 2 to 16 ranks, and recorded ones*
#
# Return `(rank, cause, since)`: `"compute"`, `"data"` or `"link"` makes every step longer by a tenth or
# more, from step `since` to the end, for at least five steps. A slow link has the rank None; the first ten
# steps are without one. Return None if nobody is slow, or all compute longer. `lab.smooth(values)`
# removes outliers.

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
# For each suspect, make one list: by how many seconds it made each step longer. A rank is compared with
# the others in the same step. The link is compared with its own past, and by the rank that waits least:
# if even that one is in collectives longer, nobody is waited for.
#
# Smooth the list. The last step in which it is below a tenth of a usual step is the last healthy one.
#
# </details>

# %%
lab.check_find_straggler(find_straggler)

# %%
lab.show_stragglers(find_straggler)

# %% [markdown]
# **Notice:** the slow rank's line rises above and falls below, for slow computing and slow data alike. With
# a slow link only the lower lines rise, on all ranks. Which link it is, these seconds do not say: notebook
# 06 measures one link after the other.

# %% [markdown]
# ## Optional: without a restart, with torchft
#
# Two ranks of 16,384 fail, and elastic restart stops all others, each time. **torchft**, a library of the
# PyTorch project, cuts the job into **replica groups**. Each is a whole copy of the model, with FSDP
# inside if it is large, and a launch of its own. Groups share nothing but the all-reduce of gradients. So
# a group that fails takes no other with it.

# %% [markdown]
# A small program, the **lighthouse**, says anew at each step who takes part: the **quorum**. Each group
# sends it heartbeats. In your training loop two objects are torchft's:
#
# | Call | does |
# |:--|:--|
# | `optimizer.zero_grad()` | asks for the quorum of this step; if it is another one, makes a new process group |
# | `manager.allreduce(p.grad)` | the mean over the quorum; never raises: an error spoils the step |
# | `optimizer.step()` | steps only if nothing has spoiled the step; else it is taken again |

# %% [markdown]
# A group that joins has fallen behind, so it **heals**: it fetches the state of another group over HTTP,
# which `state` returns there and `load` takes here. No checkpoint is read. Below each group has one rank;
# the program that torchrun would start is this function. (torchft wraps DDP, too; but that wrapper of
# version 0.2.0, which is pinned here, fails on gloo when another group dies during its all-reduce. *[Version
# 0.3.0](https://github.com/meta-pytorch/torchft/releases/tag/v0.3.0)* mended that.)

# %%
def train_replica(name):
    from torchft import Manager, Optimizer, ProcessGroupGloo
    model, adamw = lab.replica_model()
    state, load = lab.replica_state(model, adamw)
    manager = Manager(ProcessGroupGloo(), load, state, min_replica_size=1, replica_id=name)
    optimizer = Optimizer(manager, adamw)
    while lab.goes_on(manager):
        optimizer.zero_grad()
        x, y = lab.replica_batch(manager)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters()]:
            work.wait()
        optimizer.step()
        lab.report_step(manager, loss)
    return model

# %% [markdown]
# Now group 1 is killed, and 2.5 seconds later a replacement is started. A group counts as dead after 2 s
# without a heartbeat here (`--heartbeat_timeout_ms`, by default 5000). Guess: for how many seconds does
# nobody train?

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
# **Notice:** nobody restarted group 0. It waited until the lighthouse had given up group 1, and went on
# alone, with the parameters that it had: no finished step was lost. The replacement begins with a high
# loss, because its own parameters are new; at the next step it has group 0's. In the end both are equal:

# %%
lab.show_digests(replicas)

# %% [markdown]
# What did it cost, beside the restarts above? Work that is lost while half of the job trains counts half.

# %%
lab.show_time_lost(replicas, run)

# %% [markdown]
# **Notice:** here torchft gains nothing, because this job of two ranks restarts in seconds; a large job
# needs minutes, and waits for all of its hosts. The next exercise shows where the two part.

# %% [markdown]
# While a group is missing, a step has fewer samples, so its gradient is noisier, and the
# learning rate does not know. And torchft needs at least two whole copies of the model, and memory for
# them. The lighthouse is a single point of failure: without it there is no quorum, and all groups stop.
# It does nothing else, so it fails rarely; a checkpoint on disk is needed all the same.

# %% [markdown]
# ### Exercise 8.12 · What replica groups keep
#
# *Difficulty 4 of 5 · 20 minutes · target: 41 jobs, exactly*
#
# `failures` lists (time, group), by time. From each on, nobody trains for `wait`, and that group is
# missing for `restart`; if it fails again in that time, its restart begins anew. While n of `groups`
# train, n/`groups` of the work is done. Return the share that is done from 0 to `end`. Saves do not count.

# %%
# Exercise 8.12: the share of its work that a job of replica groups does, from 0 to 1
def kept_share(groups, failures, wait, restart, end):
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
# When does the number of groups that train change? Between two such times it is constant.
#
# Collect these times from all failures, sort them, and go through neighbours. For each pair: which groups
# failed less than `restart` ago, and did any fail less than `wait` ago? Two failures of one group make one
# missing group.
#
# </details>

# %%
lab.check_kept_share(kept_share)

# %% [markdown]
# Exercise 8.9 ended with 131,072 GPUs, which fail too often for restarts of ten minutes. Here are the same
# failures and restarts, with the GPUs cut into replica groups; after a failure all wait for 10 s. One
# group is elastic restart.

# %%
lab.show_replica_groups(kept_share)

# %% [markdown]
# **Notice:** each doubling of the groups takes away nearly half of what is lost, until only the waits of
# all are left (dashed). Then the wait must become shorter, not the groups smaller.

# %% [markdown]
# ## How it usually goes wrong
#
# | Symptom | Cause |
# |:--|:--|
# | after a restart, only the first loss fits | moments or RNG not saved |
# | after a restart, losses are too good | samples seen twice in an epoch |
# | the newest checkpoint does not load | written in place |
# | restarts, no progress | saves more seldom than failures |
# | a file has weights of two steps | no snapshot |
# | a new host joins, and all end | an old address |
# | replicas drift apart | a flipped bit |

# %% [markdown]
# ## I can …
#
# - name all that a job must save, and prove that nothing is missing
# - write a checkpoint that is whole whenever its writer is killed
# - load it on another number of ranks
# - save while the job computes, and predict the host memory that it takes
# - say where the seconds between a failure and the next new step go
# - choose the interval between saves, and say when a formula is wrong
# - find the rank whose bits, or whose speed, differ

# %% [markdown]
# ## What to read
#
# - Daly, *A higher order estimate of the optimum checkpoint interval*, 2006: where does √(2δM) fail?
# - Grattafiori et al., *The Llama 3 Herd of Models*, 2024, section 3.3.4: what needed a person?
# - Zhang et al., *OPT*, 2022, section 2.5: and here?
# - Kokolis et al., *Revisiting Reliability*, 2024: how does the time between failures fall with size?
# - Dixit et al., *Silent Data Corruptions at Scale*, 2021: how was a faulty core found?

# %% [markdown]
# ## What comes next
#
# Nothing more of ours: you have built what trains large models, and what keeps them alive. Take a job of
# your own, write down what you expect of its memory, its traffic and its steps, and measure.
