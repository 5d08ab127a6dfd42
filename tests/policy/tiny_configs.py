"""A tiny configuration of every family in policies/architectures.yaml, for tests that build the models."""

from __future__ import annotations

from typing import Any

# The same small numbers under every key that asks for one: a module's ModelArgs takes the keys that it
# knows. What a family needs beside it, or differently, stands in FAMILIES.
COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qk_norm": True, "qk_norm": True, "post_norm": False,
    # experts
    "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_topk": 2,
    # MLA
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64,
    # recurrent layers
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "layer_group_size": 4, "group_norm_size": 2,
    "state_size": 16, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4,
    # windows
    "sliding_window": 24, "no_rope_layers": [1, 1, 1, 0, 1, 1],
}  # fmt: skip
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
ROPE = {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in {*SLIDING}}
MUP = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
LFM2 = {
    "conv_bias": True, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False, "block_ff_dim": 32, "use_expert_bias": True, "num_dense_layers": 2,
}  # fmt: skip
LONGCAT = {
    "num_layers": 6, "num_hidden_layers": None, "attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 2,
    "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip
KDA = {
    "linear_attn_config": {"kda_layers": [1, 2, 4, 5], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
    "model_max_length": 512,
}  # fmt: skip
NANO = {"n_embd": 64, "n_head": 4, "n_layer": 6, "n_positions": 512, "n_ctx": 512, "n_inner": 128}
NO_COMMON = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"))  # fmt: skip


def nested(**changes: Any) -> dict[str, Any]:
    """Return a configuration whose language model stands in text_config."""
    return {"text_config": {"model_type": "text", **COMMON, **changes}}


FAMILIES: dict[str, dict[str, Any]] = {
    "afm7": {**NO_COMMON, "hidden_dim": 64, "num_layers": 6, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {"layer_types": SLIDING},
    "baichuan_m1": {
        "sliding_window_layers": [1, 3], "conv_window": 2, "tie_word_embeddings": False, "num_swa_attention_heads": 8, "num_swa_key_value_heads": 4,
    },
    "dbrx": {
        **NO_COMMON, "d_model": 64, "n_layers": 6, "n_heads": 4, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": {"factor": 1.0}, "topk_method": "greedy"},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 16},
    "exaone": {"num_layers": 6, "num_hidden_layers": None},
    "exaone4": {"sliding_window_pattern": "LLG"},
    "exaone_moe": {"layer_types": SLIDING, "is_moe_layer": [False, True, True, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", *SLIDING[1:]]},
    "gemma3": nested(),
    "gemma3n": nested(
        layer_types=SLIDING, num_kv_shared_layers=3, intermediate_size=[32] * 6, activation_sparsity_pattern=[0.0] * 6,
        vocab_size_per_layer_input=96, rope_local_base_freq=10000.0, final_logit_softcapping=30.0,
        hidden_size_per_layer_input=8, altup_num_inputs=2, altup_coef_clip=120.0, altup_correct_scale=True,
        altup_active_idx=0, laurel_rank=8, query_rescale_scalar=1.0,
    ),
    "gemma4": nested(num_kv_shared_layers=2, global_head_dim=32, sliding_window_pattern=2, hidden_size_per_layer_input=8),
    "gemma4_text": {
        "num_kv_shared_layers": 0, "global_head_dim": 32, "sliding_window_pattern": 3, "hidden_size_per_layer_input": 8,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt2": {**NO_COMMON, **NANO},
    "gpt_bigcode": {**NO_COMMON, **NANO},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25, "num_key_value_heads": None},
    "gptj": {**NO_COMMON, **NANO, "rotary_dim": 8},
    "granite": MUP,
    "granitemoe": MUP,
    "granitemoehybrid": {
        **MUP, "layer_types": ["mamba", "mamba", "attention"] * 2, "shared_intermediate_size": 16, "mamba_n_heads": 4,
        "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": True,
        "mamba_proj_bias": False, "position_embedding_type": "rope",
    },
    "hunyuan": {
        "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2, "moe_topk": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "jamba": {
        "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": 4, "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "kimi_k25": nested(),
    "kimi_k3": nested(**KDA, attn_res_block_size=2, num_experts_per_token=2),
    "kimi_linear": KDA,
    "kimi_vl": nested(),
    "laguna": {"layer_types": SLIDING},
    "lfm2": {**LFM2, "full_attn_idxs": [2, 4]},
    "lfm2-vl": nested(**LFM2, layer_types=["conv", "conv", "full_attention"] * 2),
    "lfm2_moe": {**LFM2, "layer_types": ["conv", "conv", "full_attention"] * 2},
    "lille-130m": {**NO_COMMON, "block_size": 512, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 6},
    "llama": {"layer_types": SLIDING},
    "llama4": nested(
        attention_chunk_size=32, interleave_moe_layer_step=2, intermediate_size_mlp=32, num_experts_per_tok=1,
    ),
    "llama4_text": {"intermediate_size_mlp": 32},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba2": {"num_heads": 4, "n_groups": 1, "time_step_limit": [0.0, 1.0], "state_size": 16, "expand": 1},
    "mellum": {"layer_types": SLIDING, "rope_parameters": ROPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1], "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "sliding_window_size": 24, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24,
        "swa_v_head_dim": 12, "swa_rope_theta": 10000.0, "moe_layer_freq": [0, 1, 1, 1, 1, 1], "layernorm_epsilon": 1e-5,
    },
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0},
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 512, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}, "dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0},
    "minimax": {"shared_intermediate_size": 16, "rotary_dim": 8},
    "minimax_m3_vl": nested(rotary_dim=8, moe_layer_freq=[0, 1, 1, 1, 1, 1], dense_intermediate_size=32, shared_intermediate_size=16),
    "ministral3": {
        "layer_types": SLIDING,
        "rope_parameters": {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512},
    },
    "mistral3": nested(layer_types=SLIDING),
    "mistral4": {
        "rope_parameters": {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512},
    },
    "muse_spark": nested(
        layer_types=SLIDING, post_norm_eps=1e-5, rope_parameters={"rope_theta": 10000.0}, layer_rope_theta=[10000.0] * 6,
        final_logit_softcapping=20.0, output_multiplier=1.0, moe_hidden_size=32, num_shared_experts=0,
    ),
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": attention, "ffn": {"ffn_mult": 1.0}}
            for attention in (
                {"n_heads_in_group": 2}, {"n_heads_in_group": 4}, {"no_op": True}, {"n_heads_in_group": 1},
                {"n_heads_in_group": 2}, {"n_heads_in_group": 2},
            )
        ],
    },
    "nemotron_h": {
        "num_hidden_layers": None, "hybrid_override_pattern": "M-M*E*M-", "mamba_num_heads": 4, "mamba_head_dim": 16,
        "mamba_proj_bias": False, "ssm_state_size": 16, "n_groups": 1, "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {
        **NO_COMMON, "num_transformer_layers": 6, "model_dim": 64, "head_dim": 16, "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 6, 6, 8, 8], "num_kv_heads": [1, 1, 2, 2, 4, 4], "ffn_multipliers": [1.0] * 6,
    },
    "phi3small": {
        "vocab_size": 100352,  # it writes to fixed places of the logits
        "dense_attention_every_n_layers": 1, "ff_intermediate_size": 32, "gegelu_limit": 20.0,
        "mup_width_multiplier": 1.0, "mup_attn_multiplier": 1.0, "mup_embedding_multiplier": 1.0, "rope_embedding_base": 10000.0,
        "rope_position_scale": 1.0,
    },
    "phixtral": {**NO_COMMON, "num_vocab": 96, "model_dim": 64, "num_heads": 4, "num_layers": 6, "rotary_dim": 8},
    "pixtral": nested(),
    "plamo": {"n_shared_head": 2, "num_key_value_heads": None},
    "plamo3": {"sliding_window_pattern": 3},
    "qwen": {"kv_channels": 16, "num_key_value_heads": None, "head_dim": None},
    "qwen3_5": nested(),
    "qwen3_vl_moe": nested(),
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 24,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
    },
    "spark2_5": {"layer_types": SLIDING, "rope_parameters": ROPE},
    "stablelm": {"use_qkv_bias": False},
    "step3p5": {
        "num_attention_groups": 2, "num_key_value_heads": None,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
    },
}  # fmt: skip

NOT_BUILT = {
    "olmo": "needs the package ai2-olmo",
    "prism_hadamard_qwen35": "needs the module list of a packed checkpoint; a subclass of qwen3_5",
}
NOT_RUN = {"bitnet", "muse_spark"}  # their Metal kernels are built in the forward pass


def tiny_config(family: str) -> dict[str, Any]:
    """Return the config.json of a tiny model of *family*."""
    return {**COMMON, "model_type": family, **FAMILIES.get(family, {})}
