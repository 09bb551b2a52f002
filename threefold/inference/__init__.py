"""Inference with a trained model in any tp × pp layout: text generation, and evaluation on texts.

`model` loads this rank's shards of a run's newest checkpoint and runs the forward pass; `kv_cache` has the KV cache,
`generate` the generation loop over batches of prompts, `sampling` the choice of the next token; `log_likelihood`
computes the loss of given tokens, and `eval_tasks` defines which tokens of a text are evaluated.
"""
