"""The private parts of torch that the package uses, each with why, and what would replace it.

`tensors` holds those of one device, `distributed` those of meshes, FSDP, DTensor and checkpoints, `pipelining` those of
pipeline schedules, so that models import nothing of `torch.distributed`. No other file uses a name of torch that begins
with an underscore (`tests/test_house.py`); `tests/test_torch_private.py` has a test of each part here, whose failure
says in a sentence what torch has changed.
"""
