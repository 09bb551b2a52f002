"""Prints where the package is imported from."""

import threefold

print(threefold.__file__)
