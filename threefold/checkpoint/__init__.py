"""Checkpoints: global tensors under global names, so that any layout reads what another wrote.

In a save, `save` makes the folder, `tensors` writes each rank's tensors, `index` tensors.json, and `manifest`
checkpoint.json. `folder` finds the newest valid one; `resume` decides whether a run may go on from it.
"""
