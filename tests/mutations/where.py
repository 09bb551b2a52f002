"""Prints where the packages are imported from."""

import threefold
import threefold_parity

print(threefold.__file__, threefold_parity.__file__)
