"""A training step whose ranks are threads of one process, to be read, filtered and debugged (`threefold.explain`)."""
