"""A trained model at work in any tp × pp layout: writing on from prompts, and being measured on texts.

`model` loads this rank's part of a run's newest checkpoint and runs tokens through it, `cache` keeps keys and values,
`generate` decides which sequences are worked on, `sampling` what comes next; `scoring` gives the loss of chosen tokens,
and `tasks` says which tokens of a text those are.
"""
