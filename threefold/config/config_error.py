"""The error of an invalid setting, in one sentence, and the setting that was meant by a name that is none."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from threefold.config.schema import Config
from threefold.errors import UserError
from threefold.files import shown

_UNSET = object()
_ELSEWHERE = {
    "lr": "learning_rate",
    "clip_grad_norm": "grad_clip gradient_clipping max_grad_norm max_norm",
    "max_steps": "max_iters train_iters total_steps num_steps steps iterations",
    "epochs": "num_epochs num_train_epochs max_epochs",
    "num_layers": "n_layer n_layers layers num_hidden_layers depth",
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
"""Settings, and what Megatron-LM, torchtitan, nanoGPT, Hugging Face, Lightning, DeepSpeed or Paddle call them."""


def problem(config: Config, key: str, rule: str, value: Any = _UNSET) -> UserError:
    """The error that `key` (`section.name`) breaks `rule`, which is what follows 'but'.

    Args:
        config: of the setting; has the line it was set on.
        key: `section.name`.
        rule: the rule and the nearest value that works.
        value: what the setting is, when that is a default that `config` does not hold yet.
    """
    section, name = key.split(".")
    value = getattr(getattr(config, section), name) if value is _UNSET else value
    text = str(list(value) if isinstance(value, tuple) else value)
    return UserError(
        f"{config.origin(key)}{key} is {shown(text.lower() if isinstance(value, bool) else text)} but {rule}."
    )


def nearest_setting(key: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """The setting that was most likely meant; a section when a section's name was misspelt.

    Args:
        key: `section.name`, or a name alone.
        known: all settings, as `section.name`.
        sections: names of the sections.
    """
    section, _, name = key.rpartition(".")
    if section not in sections:
        close = get_close_matches(section or name, sections, n=1)
        if close and not section:
            return close[0]
        section = close[0] if close else section
    meant = next((ours for ours, theirs in _ELSEWHERE.items() if name.lower() in theirs.split()), name)
    same = [candidate for candidate in known if _name(candidate) == meant]
    of_section = [candidate for candidate in known if candidate.split(".")[0] == section]
    if same:
        return next((candidate for candidate in same if candidate in of_section), same[0])
    inside = get_close_matches(f"{section}.{name}", of_section, n=1)
    anywhere = get_close_matches(name, [_name(candidate) for candidate in known], n=1, cutoff=0)
    return (inside or [candidate for candidate in known if _name(candidate) == anywhere[0]])[0]


def _name(key: str) -> str:
    return key.split(".")[1]
