"""Expert parallelism: each rank has some experts, and tokens reach them by all-to-all."""
