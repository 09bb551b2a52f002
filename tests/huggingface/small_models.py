"""Settings of small models of each of Hugging Face's types, as its config classes take them."""

from typing import Any

from tests.huggingface.hand_made import EXPERTS, GPT, SIZES

LENGTH = 40  # of the sequences that are compared

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.3, 2.5, 6.0],
    "partial_rotary_factor": 0.75,
}
BY_KIND = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 11, "sliding_window": 5}
LATENT = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SHARPENED = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT),
    "gpt2 untied": ("gpt2", GPT | {"n_inner": 50, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "llama": ("llama", SIZES | {"rope_parameters": LLAMA3}),
    "llama tied": ("llama", SIZES | {"tie_word_embeddings": True, "head_dim": 8, "rms_norm_eps": 1e-3}),
    "llama yarn": (
        "llama",
        SIZES | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 8.0}},
    ),
    "llama linear": ("llama", SIZES | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama dynamic": (
        "llama",
        SIZES
        | {
            "max_position_embeddings": LENGTH - 10,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "qwen2": ("qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", SIZES | {"head_dim": 8}),
    "mistral": ("mistral", SIZES | {"sliding_window": 7}),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2_moe": ("qwen2_moe", SIZES | EXPERTS | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", SIZES | EXPERTS | {"head_dim": 8, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "olmo2": ("olmo2", SIZES),
    "olmo3": ("olmo3", SIZES | {"num_hidden_layers": 5, "sliding_window": 5, "rope_parameters": BY_KIND}),
    "gemma2": ("gemma2", SIZES | GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": (
        "gemma3_text",
        SIZES | GEMMA | {"num_hidden_layers": 7, "rope_parameters": BY_KIND | {"full_attention": LINEAR}},
    ),
    "glm": ("glm", SIZES | {"head_dim": 8, "pad_token_id": 0}),
    "glm4": ("glm4", SIZES | {"head_dim": 8, "partial_rotary_factor": 0.75, "pad_token_id": 0}),
    "glm4 without biases": ("glm4", SIZES | {"head_dim": 8, "attention_bias": False, "pad_token_id": 0}),
    "phi3": ("phi3", SIZES | {"pad_token_id": 0, "partial_rotary_factor": 0.5, "sliding_window": 6}),
    "deepseek_v2 lite": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": SHARPENED},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": 11, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 3.0, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {"q_lora_rank": 11, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
        | {"rope_parameters": SHARPENED | {"factor": 3.0}},
    ),
    "gpt_oss": (
        "gpt_oss",
        SIZES
        | {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 0.6}
        | {"rope_parameters": YARN | {"truncate": False, "factor": 8.0}},
    ),
    "gpt2 relu": ("gpt2", GPT | {"activation_function": "relu", "embd_pdrop": 0.3}),
    "gpt2 gelu": ("gpt2", GPT | {"activation_function": "gelu"}),
    **{
        f"phi3 longrope, {name}": (
            "phi3",
            SIZES
            | {"pad_token_id": 0, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": LONGROPE}
            | {"original_max_position_embeddings": original},
        )
        for name, original in {"within": LENGTH, "beyond": LENGTH - 1}.items()
    },
}
