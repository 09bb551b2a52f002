"""Checkpoints: global tensors under global names, so that every layout reads what another wrote.

`folder` locates the checkpoints of a run, `manifest` is their checkpoint.json, `format` their tensor files, `tensors`
reads and writes these through torch.distributed.checkpoint, `save` writes a checkpoint atomically, `selection` finds
the newest valid one, `resume` decides whether a run may resume from it and `warm_start` whether one may start from it.
"""
