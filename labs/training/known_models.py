"""Sizes of models that everybody knows, from the `config.json` that each is published with."""

SIZES = {
    "GPT-2": ("gpt2", 768, 12, 12),
    "GPT-2 XL": ("gpt2", 1600, 48, 25),
    "Llama-2-7B": ("llama", 4096, 32, 32, 32, 11008, 32000),
    "Llama-2-13B": ("llama", 5120, 40, 40, 40, 13824, 32000),
    "Llama-3-8B": ("llama", 4096, 32, 32, 8, 14336, 128256),
    "Llama-3-70B": ("llama", 8192, 80, 64, 8, 28672, 128256),
    "Qwen2-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936),
    "Qwen2-7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Mistral-7B": ("mistral", 4096, 32, 32, 8, 14336, 32000),
    "Gemma-7B": ("gemma", 3072, 28, 16, 16, 24576, 256000),
    "Phi-3-mini": ("phi3", 3072, 32, 32, 32, 8192, 32064),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12288, 151936),
    "Mixtral-8x7B": ("mixtral", 4096, 32, 32, 8, 14336, 32000),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 48, 32, 4, 6144, 151936),
    "DeepSeek-V3": ("deepseek_v3", 7168, 61, 128, 128, 18432, 129280),
}
"""Name -> (family, width, layers, heads, heads of keys, width of the MLP, vocabulary), of a GPT-2
the first four."""

TIED = ("Qwen2-0.5B", "Gemma-7B")
"""Those whose head is the embedding, of other families than GPT-2."""

MIXTURES = {
    "Mixtral-8x7B": dict(num_local_experts=8, num_experts_per_tok=2),
    "Qwen3-30B-A3B": dict(head_dim=128, moe_intermediate_size=768, num_experts=128,
                          num_experts_per_tok=8),
    "DeepSeek-V3": dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                        qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=2048,
                        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
                        first_k_dense_replace=3),
}
"""Those with experts -> further sizes, in the names of their `config.json`. DeepSeek-V3's further
head, which predicts a second token, is left out, as transformers leaves it out."""
