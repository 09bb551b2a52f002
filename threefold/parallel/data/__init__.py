"""Data parallelism: gradient buckets, their compression, ZeRO."""
