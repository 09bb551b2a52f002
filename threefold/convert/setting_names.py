"""Names of settings in other systems, by which an unknown key of a config is recognized."""

from typing import Final

SETTING_NAMES: Final = {
    "lr": "learning_rate",
    "clip_grad_norm": "grad_clip gradient_clipping max_grad_norm max_norm",
    "max_steps": "max_iters train_iters total_steps num_steps steps iterations",
    "epochs": "num_epochs num_train_epochs max_epochs",
    "num_layers": "n_layer n_layers num_hidden_layers depth",
    "hidden_size": "n_embd d_model dim hidden_dim hidden model_dim embed_dim",
    "num_attention_heads": "n_head n_heads heads num_heads",
    "num_key_value_heads": "n_kv_heads num_kv_heads kv_heads num_query_groups",
    "ffn_hidden_size": "intermediate_size d_ff ffn_dim mlp_dim",
    "max_position_embeddings": "n_positions max_seq_len",
    "sequence_length": "seq_len seq_length block_size context_length max_seq_length",
    "global_batch_size": "batch_size train_batch_size",
    "micro_batch_size": "mbs per_device_train_batch_size train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "grad_accum accumulate_grad_batches",
    "tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree mp_degree",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_degree",
    "dp": "data_parallel data_parallel_size data_parallel_replicate_degree dp_degree",
    "cp": "context_parallel context_parallel_size context_parallel_degree",
    "ep": "expert_parallel expert_parallel_size expert_model_parallel_size",
    "zero": "zero_stage sharding_stage",
    "dtype": "mixed_precision amp",
    "recompute": "gradient_checkpointing activation_checkpointing activation_checkpoint",
}
"""Our setting → its names in Megatron-LM, torchtitan, nanoGPT, Hugging Face, Lightning, DeepSpeed and Paddle."""
