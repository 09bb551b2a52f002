"""Pipeline parallelism: stages of a model on different ranks, and schedules that run micro-batches through them."""
