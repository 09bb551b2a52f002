"""Models as for one device, a folder for each family, and the rules by which parallelism shards them."""
