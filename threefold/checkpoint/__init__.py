"""Checkpoints: global tensors under global names, so that any layout reads what another wrote.

`folder` locates the checkpoints of a run, `manifest` is their checkpoint.json, `index` and `storage` are their tensor
files, `tensors` reads and writes these through torch.distributed.checkpoint, `save` writes a checkpoint atomically,
`selection` finds the newest valid one, and `resume` decides whether a run may resume or start from it.
"""
