"""For ranks on CPUs: shared memory within a host, gloo for tensors of a GPU, faster products, attention in tiles."""
