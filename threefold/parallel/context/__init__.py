"""Context parallelism: attention over a sequence whose positions are sharded, by all-gather or ring."""
