"""Models as for one device, with a folder for each family, and the rules by which parallelism shards them."""
