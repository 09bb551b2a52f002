"""Inference with a trained model in any tp × pp layout: text generation, and evaluation on texts.

`model` loads this rank's shards of a run's newest checkpoint, and implements the forward pass and the KV cache.
`generate` implements sampling and the generation loop over batches of prompts. `eval_tasks` computes log-likelihoods of
given tokens and defines which tokens of a text are evaluated.
"""
