"""Calls of other systems under their own names: Horovod's in `horovod`, Paddle's and Fleet's in `paddle`."""

from threefold.compat import horovod as horovod
from threefold.compat import paddle as paddle
