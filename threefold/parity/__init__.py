"""Recording of runs for `threefold-parity`, a package of its own in `parity/`, which compares them with other code."""
