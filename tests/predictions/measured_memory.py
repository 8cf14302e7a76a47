"""What one process really allocates: the yardstick that closed forms are held against."""

import copy
import gc
import time

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

QUIET = dict(bos_token_id=None, eos_token_id=None)


def gpt2(hidden=64, layers=2, heads=4, vocabulary=300, dropout=0.0, **more):
    """A small GPT-2's configuration."""
    return GPT2Config(**QUIET | dict(
        n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=128,
        embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout, use_cache=False) | more)


def llama(hidden=64, layers=2, heads=4, kv=2, ffn=160, vocabulary=300, tied=False,
          cls=LlamaConfig, **more):
    """A small Llama's configuration."""
    return cls(**QUIET | dict(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, intermediate_size=ffn, vocab_size=vocabulary,
        tie_word_embeddings=tied, use_cache=False, pad_token_id=None) | more)


def qwen2(**more):
    """A small Qwen2's configuration."""
    return llama(cls=Qwen2Config, **more)


def model_of(config, dtype=torch.float32, checkpointing=False):
    """A model with random weights in training mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.loss_type = "ForCausalLM"
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch_of(config, batch, sequence):
    """Random tokens, which are their own labels."""
    tokens = torch.randint(0, config.vocab_size, (batch, sequence))
    return {"input_ids": tokens, "labels": tokens}


def saved_bytes(model, batch) -> dict:
    """storage key -> (bytes, shape, dtype, op) of all that autograd keeps at the end of forward;
    parameters and what belongs to the batch do not count."""
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *batch.values()]}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = (storage.nbytes(), tuple(tensor.shape), tensor.dtype)
        return tensor

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    torch.set_num_threads(threads)
    # Keep the graph until every address has been read, so that none is used twice.
    del loss
    return storages


def memory_events(run) -> list:
    """(nanoseconds, +/- bytes) of every allocation that `run` makes, in time order."""
    gc.collect()  # what earlier models left behind must not be freed, and counted, in here
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are small, and cores are shared
    with torch.profiler.profile(profile_memory=True, activities=[
            torch.profiler.ProfilerActivity.CPU]) as prof:
        run()
    torch.set_num_threads(threads)
    events = [(event.start_ns(), event.nbytes()) for event in
              prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sorted(events, key=lambda event: event[0])


def phases_of_plain(config, batch, sequence, *, dtype=torch.float32, checkpointing=False) -> dict:
    """Phase -> bytes held at its end, and "peak": of the second of two steps on one process."""
    return _phases(config, batch, sequence, dtype, checkpointing, lambda model: model)


def phases_of_fsdp(config, batch, sequence, ranks, *, reshard=True, recipe="fp32",
                   checkpointing=False) -> dict:
    """The same for rank 0 of `ranks` under FSDP2: real tensors, a process group that does nothing.

    Over gloo the events are not enough: its threads free tensors unseen by the profiler."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return _phases(config, batch, sequence, torch.float32, checkpointing,
                       lambda model: _fsdp(model, ranks, reshard, recipe))
    finally:
        dist.destroy_process_group()


def _fsdp(model, ranks, reshard, recipe):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = dict(mesh=init_device_mesh("cpu", (ranks,)))
    if recipe == "bf16 policy":
        options["mp_policy"] = policy
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    return fully_shard(model, **options)


def _phases(config, batch, sequence, dtype, checkpointing, wrap) -> dict:
    data, marks = batch_of(config, batch, sequence), []

    def mark(name):
        marks.append((time.time_ns(), name))

    def run():
        model = wrap(model_of(config, dtype, checkpointing))
        optimizer = torch.optim.AdamW(model.parameters())
        mark("build")
        for _ in range(2):
            loss = model(**data).loss
            mark("forward")
            loss.backward()
            del loss
            mark("backward")
            optimizer.step()
            mark("step")
            optimizer.zero_grad()

    return _at(memory_events(run), marks)


def _at(events, marks) -> dict:
    """Bytes held at each mark, the last one of its name; the peak after the first step."""
    changes = sorted([*((t, size) for t, size in events), *marks], key=lambda each: each[0])
    now, found, peak, steps = 0, {}, 0, 0
    for _, what in changes:
        if isinstance(what, str):
            found[what] = now
            steps += what == "step"
        else:
            now += what
            peak = max(peak, now) if steps == 1 else peak
    return found | {"peak": peak}
