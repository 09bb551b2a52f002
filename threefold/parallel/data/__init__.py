"""Data parallelism: all-reduce of gradients in buckets, their compression, and ZeRO."""
