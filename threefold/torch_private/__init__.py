"""Private parts of torch that the package uses, each with the reason why, and with what would replace it.

They are in several files so that models import nothing of `torch.distributed`; those that only an attached room uses
are in its own `torch_private.py`. No other file uses a name of torch that begins with an underscore
(`tests/test_house.py`). A canary among the tests tests each part; a failing one explains in one sentence what has
changed in torch. Importing the package checks another torch than the tested one.
"""

import torch

from threefold.torch_private.probe import require_parts

require_parts(torch.__version__)  # before a file beside this one fails to import
