"""Pipeline parallelism: which stages a rank has, and schedules that run micro-batches through them."""
