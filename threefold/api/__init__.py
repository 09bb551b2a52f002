"""The Python library: what `threefold` names for scripts and notebooks, on the parts that the command line uses."""

from threefold.api import callbacks as callbacks
