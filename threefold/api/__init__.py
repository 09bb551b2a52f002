"""Python API for scripts and notebooks, exported by `threefold` and built on the same parts as the command line."""
