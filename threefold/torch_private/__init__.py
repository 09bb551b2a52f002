"""Private parts of torch that the package uses, each with the reason why, and with what would replace it.

They are in several files so that models import nothing of `torch.distributed`. No other file uses a name of torch that
begins with an underscore (`tests/test_house.py`). `tests/test_torch_private.py` tests each part; a failing test
explains in one sentence what has changed in torch. Importing the package checks another torch than the tested one.
"""

import torch

from threefold.torch_private.probe import require_parts

require_parts(torch.__version__)  # before a file beside this one fails to import
