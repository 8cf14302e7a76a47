"""Training jobs of kinds that the memory bench's grid has not: other models, optimizers, options of
DDP and FSDP2, loops. Each is predicted, and measured on real ranks, or refused with a reason."""

import functools

import torch
from torch import nn

from _bench import memory_loops as loops
from _bench import memory_models as models
from _bench.memory_models import floats, integers, of_config, of_module, tokens
from labs.predictions.dryrun.jobs import DryRunJob
from labs.training import strategies
from labs.training.models import EdgeCaseModel, blocks


def job(model, inputs=None, *, ranks=1, strategy="plain", **more) -> DryRunJob:
    """A job; on more than one rank with DDP unless another strategy is named."""
    strategy = "ddp" if ranks > 1 and strategy == "plain" else strategy
    return DryRunJob(model, ranks, strategy, more.pop("batch", 2), more.pop("sequence", 64),
               inputs=inputs, **more)


def checkpointed(every: int, reentrant: bool = False):
    """A GPT-2 of which every so many-th block is checkpointed."""
    def make():
        from torch.utils.checkpoint import checkpoint

        model = GPT2()
        for block in list(blocks(model))[::every]:
            block.forward = _checkpointing(checkpoint, block.forward, reentrant)
        return model
    return make


def _checkpointing(checkpoint, forward, reentrant):
    def called(*args, **kwargs):
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)
    return called


def edge_batch():
    """A batch for EdgeCaseModel."""
    return {name: torch.zeros(4, 8, dtype=torch.int64) for name in "xy"}


GPT2 = of_config("GPT2Config", **models.SMALL, n_positions=128, n_embd=96, n_layer=3, n_head=4,
                 resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
DROPPING = of_config("GPT2Config", **models.SMALL, n_positions=128, n_embd=96, n_layer=2, n_head=4)
LLAMA = of_config("LlamaConfig", **models.DECODER)
IMAGES = {"image_size": 32, "patch_size": 8}
VIT = of_config("ViTConfig", "AutoModelForImageClassification", hidden_size=96,
                intermediate_size=256, num_attention_heads=4, num_hidden_layers=2, **IMAGES)
MOE = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
           shared_expert_intermediate_size=64)
LSTM, RESNET = models.Recurrent, of_module(models.ResNet)
MLP, ROWS = of_module(models.mlp), floats(64, 32)


def pixels():
    """A batch of images with labels."""
    return {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)}


def spectrogram():
    """A batch of Whisper's."""
    return {"input_features": torch.zeros(2, 20, 64),
            "labels": torch.zeros(2, 16, dtype=torch.int64)}


def optimizer(name: str, **options):
    """torch's optimizer of this name, with options, as a class for a DryRunJob."""
    made = functools.partial(getattr(torch.optim, name), **options)
    functools.update_wrapper(made, getattr(torch.optim, name))
    return made


WHISPER = of_config("WhisperConfig", "AutoModelForSpeechSeq2Seq", vocab_size=256, d_model=64,
                    num_mel_bins=20, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
                    max_source_positions=32, max_target_positions=32, pad_token_id=0,
                    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
T5 = of_config("T5Config", "AutoModelForSeq2SeqLM", vocab_size=256, d_model=64, d_kv=16, d_ff=128,
               num_layers=2, num_heads=4, decoder_start_token_id=0)
MAMBA = of_config("MambaConfig", **models.SMALL, hidden_size=64, state_size=8, num_hidden_layers=2)
MAMBA2 = of_config("Mamba2Config", **models.SMALL, hidden_size=64, state_size=8, head_dim=16,
                   num_heads=8, n_groups=1, chunk_size=16, num_hidden_layers=2)

MODELS = {
    "BERT": job(of_config("BertConfig", "AutoModelForMaskedLM", **models.ENCODER), tokens()),
    "BERT, a mask, DDP": job(of_config("BertConfig", "AutoModelForMaskedLM", **models.ENCODER),
                             tokens(attention_mask=(2, 64)), ranks=2),
    "DistilBERT": job(of_config("DistilBertConfig", "AutoModelForMaskedLM", **models.SMALL, dim=96,
                                hidden_dim=256, n_heads=4, n_layers=2), tokens()),
    "ALBERT": job(of_config("AlbertConfig", "AutoModelForMaskedLM", embedding_size=48,
                            **models.ENCODER), tokens(), ranks=2),
    "T5": job(T5, tokens()), "T5, FSDP2": job(T5, tokens(), ranks=2, strategy="fsdp2"),
    "ViT": job(VIT, pixels), "ViT, DDP": job(VIT, pixels, ranks=2),
    "Whisper": job(WHISPER, spectrogram),
    "Whisper, FSDP2": job(WHISPER, spectrogram, ranks=2, strategy="fsdp2"),
    "ConvNeXt": job(of_config("ConvNextConfig", "AutoModelForImageClassification",
                              hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]), pixels),
    "ResNet of transformers": job(of_config(
        "ResNetConfig", "AutoModelForImageClassification", embedding_size=16,
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]), pixels, ranks=2),
    "Mamba": job(MAMBA, tokens()), "Mamba, FSDP2": job(MAMBA, tokens(), ranks=2, strategy="fsdp2"),
    "Mamba-2": job(MAMBA2, tokens()),
    "Mixtral": job(of_config("MixtralConfig", **models.DECODER | MOE), tokens()),
    "Qwen2-MoE": job(of_config("Qwen2MoeConfig", **models.DECODER | MOE), tokens()),
    "OPT": job(of_config("OPTConfig", **models.SMALL, hidden_size=96, ffn_dim=256,
                         num_attention_heads=4, num_hidden_layers=2, word_embed_proj_dim=96,
                         max_position_embeddings=128, dropout=0.1), tokens()),
    "BLOOM": job(of_config("BloomConfig", **models.SMALL, hidden_size=96, n_head=4, n_layer=2),
                 tokens()),
    "GPT-NeoX, bf16": job(of_config("GPTNeoXConfig", **models.ENCODER), tokens(),
                          precision="bf16"),
    "Gemma-2": job(of_config("Gemma2Config", **models.DECODER, head_dim=24), tokens()),
    "Falcon": job(of_config("FalconConfig", **models.SMALL, hidden_size=96, num_attention_heads=4,
                            num_hidden_layers=2), tokens()),
    "LSTM": job(LSTM, tokens()), "LSTM, DDP": job(LSTM, tokens(), ranks=2),
    "LSTM, both directions": job(functools.partial(LSTM, bidirectional=True), tokens()),
    "GRU": job(functools.partial(LSTM, nn.GRU), tokens()),
    "RNN": job(functools.partial(LSTM, nn.RNN), tokens()),
    "ResNet": job(RESNET, floats(4, 3, 48, 48)),
    "ResNet, bf16": job(RESNET, lambda: {"x": torch.zeros(4, 3, 48, 48, dtype=torch.bfloat16)},
                        precision="bf16"),
    "ResNet, channels last": job(RESNET, lambda: {"x": torch.zeros(4, 3, 48, 48).to(
        memory_format=torch.channels_last)}),
    "ResNet, DDP": job(RESNET, floats(4, 3, 48, 48), ranks=2),
    "ResNet, group norm": job(of_module(functools.partial(
        models.ResNet, functools.partial(nn.GroupNorm, 4))), floats(4, 3, 48, 48)),
    "U-Net": job(of_module(models.UNet), floats(2, 3, 32, 32)),
    "convolution in 3-D": job(of_module(lambda: nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.AvgPool3d(2),
        nn.Conv3d(8, 4, 3))), floats(2, 2, 12, 16, 16)),
    "convolutions over time": job(of_module(models.Convolved), floats(2, 20, 96)),
    "Fourier transform": job(of_module(models.Spectral), floats(4, 32, 64)),
    "sort, scan, scatter": job(of_module(models.Selecting), floats(4, 32, 64)),
    "bags of embeddings": job(of_module(models.Bagged), integers(64, 20)),
    "transformer of torch": job(of_module(models.Jamming), floats(2, 32, 64)),
    "experts by nonzero": job(of_module(models.MixtureOfExperts), floats(64, 32)),
    "looks at a number": job(of_module(lambda: Peeking()), ROWS),
    "compiled": job(lambda: torch.compile(MLP()), ROWS),
}


class Peeking(nn.Module):
    """Computes on only where a mean is positive."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        y = self.linear(x)
        return y if y.mean() > 0 else self.linear(y)


OPTIMIZERS = {
    "SGD": job(MLP, ROWS, optimizer=optimizer("SGD")),
    "SGD with momentum, FSDP2": job(GPT2, tokens(), ranks=2, strategy="fsdp2",
                                    optimizer=optimizer("SGD", momentum=0.9)),
    "Adagrad": job(MLP, ROWS, optimizer=optimizer("Adagrad")),
    "RMSprop, centred": job(MLP, ROWS, optimizer=optimizer("RMSprop", centered=True, momentum=0.9)),
    "Adafactor": job(GPT2, tokens(), optimizer=optimizer("Adafactor")),
    "NAdam": job(MLP, ROWS, optimizer=optimizer("NAdam")),
    "Adadelta, foreach": job(MLP, ROWS, optimizer=optimizer("Adadelta", foreach=True)),
    "AdamW, foreach": job(GPT2, tokens(), optimizer=optimizer("AdamW", foreach=True)),
    "AdamW, fused": job(GPT2, tokens(), optimizer=optimizer("AdamW", fused=True)),
    "AdamW, fused, FSDP2": job(LLAMA, tokens(), ranks=2, strategy="fsdp2",
                               optimizer=optimizer("AdamW", fused=True)),
    "AdamW, amsgrad": job(MLP, ROWS, optimizer=optimizer("AdamW", amsgrad=True)),
    "Lion": job(GPT2, tokens(), optimizer=models.Lion),
    "Muon": job(of_module(lambda: nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))), ROWS,
        optimizer=optimizer("Muon")),
    "LBFGS": job(MLP, ROWS, optimizer=optimizer("LBFGS"), loop=lambda m, o, b: o.step(
        lambda: (o.zero_grad(), loss := m(**b).loss, loss.backward())[1])),
    "two optimizers": job(of_module(models.Adversarial), floats(64, 16),
                          strategy=loops.two_optimizers, loop=loops.adversarial),
    "a schedule": job(GPT2, tokens(), loop=loops.scheduled),
    "clipping": job(GPT2, tokens(), loop=loops.clipped),
    "clipping, FSDP2": job(GPT2, tokens(), ranks=2, strategy="fsdp2", loop=loops.clipped),
    "gradients set to zero": job(GPT2, tokens(), ranks=2, loop=loops.zeroed),
}

PARALLEL = {
    "the workbook's ddp": job(GPT2, tokens(), ranks=2, strategy=strategies.ddp),
    "the workbook's fsdp2": job(LLAMA, tokens(), ranks=2, strategy=strategies.fsdp2),
    "the workbook's fsdp2, kept": job(LLAMA, tokens(), ranks=4,
                                      strategy=strategies.fsdp2_no_reshard),
    "ZeroRedundancyOptimizer": job(GPT2, tokens(), ranks=2, strategy=strategies.zero_redundancy),
    "FSDP1": job(GPT2, tokens(), ranks=2, strategy=strategies.fsdp1),
    "DDP, static graph": job(GPT2, tokens(), ranks=2, options={"static_graph": True}),
    "DDP, unused": job(of_module(models.Tied), floats(32, 64), ranks=2,
                       options={"find_unused_parameters": True}),
    "DDP, unused in a model that has none": job(GPT2, tokens(), ranks=2,
                                                options={"find_unused_parameters": True}),
    "DDP, unused, views": job(of_module(models.Tied), floats(32, 64), ranks=2, options={
        "find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "DDP, static graph, views": job(GPT2, tokens(), ranks=2, options={
        "static_graph": True, "gradient_as_bucket_view": True}),
    "DDP, a cap of 0.1 MiB": job(GPT2, tokens(), ranks=4, options={"bucket_cap_mb": 0.1}),
    "DDP, fp16 gradients": job(GPT2, tokens(), ranks=2, strategy=loops.of_half_gradients),
    "DDP, edge cases": job(EdgeCaseModel, edge_batch, ranks=2),
    "DDP, accumulation": job(GPT2, tokens(), ranks=2, loop=loops.accumulated),
    "DDP, accumulation, no sync": job(GPT2, tokens(), ranks=2, loop=loops.accumulated_without_sync),
    "DDP, autocast": job(LLAMA, tokens(), ranks=2, precision="mixed"),
    "FSDP2, reshard to 2 of 4": job(LLAMA, tokens(), ranks=4, strategy="fsdp2",
                                    options={"reshard_after_forward": 2}),
    "FSDP2, nested units": job(LLAMA, tokens(), ranks=2, strategy=loops.nested),
    "FSDP2, no root": job(LLAMA, tokens(), ranks=2, strategy=loops.without_root),
    "FSDP2, ignored parameters": job(LLAMA, tokens(), ranks=2, strategy=loops.with_ignored),
    "FSDP2, 2 x 2": job(LLAMA, tokens(), ranks=4, strategy=loops.hybrid),
    "FSDP2, offload": job(LLAMA, tokens(), ranks=2, strategy=loops.offloaded),
    "FSDP2, mixed, kept": job(LLAMA, tokens(), ranks=2, strategy="fsdp2", precision="mixed",
                              options={"reshard_after_forward": False}),
    "FSDP2, accumulation": job(LLAMA, tokens(), ranks=2, strategy="fsdp2", loop=loops.accumulated),
    "FSDP2, accumulation, no sync": job(LLAMA, tokens(), ranks=2, strategy="fsdp2",
                                        loop=loops.accumulated_whole),
    "FSDP2, odd sizes": job(EdgeCaseModel, edge_batch, ranks=3, strategy="fsdp2"),
    "FSDP2, ResNet": job(RESNET, floats(4, 3, 48, 48), ranks=2, strategy="fsdp2"),
    "every second block checkpointed": job(checkpointed(2), tokens()),
    "reentrant checkpoints": job(checkpointed(1, reentrant=True), tokens()),
    "dropout, checkpointed": job(DROPPING, tokens(), checkpointing="full"),
    "bf16": job(LLAMA, tokens(), precision="bf16"),
    "autocast": job(LLAMA, tokens(), precision="mixed"),
    "GPT-2 by eager attention": job(of_config(
        "GPT2Config", **models.SMALL, n_positions=128, n_embd=96, n_layer=2, n_head=4,
        attn_implementation="eager"), tokens()),
}

KINDS = {**MODELS, **OPTIMIZERS, **PARALLEL}
