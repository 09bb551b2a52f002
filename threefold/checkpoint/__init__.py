"""Checkpoints: global tensors under global names, so that any layout reads what another wrote.

A save goes through four files: `save` makes a folder, and gives it its name last; `tensors` writes the files of
tensors, each rank its own, through torch.distributed.checkpoint; `index` is their tensors.json; `manifest` is
checkpoint.json.
`folder` locates the checkpoints of a run and finds the newest valid one, and `resume` decides whether a run may resume
or start from it. `summary` and `conversion` serve `threefold checkpoint`; `remote` copies checkpoints to other storage.
"""
