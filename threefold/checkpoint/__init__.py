"""Checkpoints: global tensors under global names, so that any layout reads what another wrote.

Four modules take part in a save: `save` creates the folder and renames it at the end; `tensors` writes each rank's
tensor file through torch.distributed.checkpoint; `index` writes tensors.json; `manifest` writes checkpoint.json.
`folder` locates the checkpoints of a run and finds the newest valid one, and `resume` decides whether a run may resume
or start from it. `summary` and `conversion` implement `threefold checkpoint`; `remote` copies checkpoints to other
storage.
"""
