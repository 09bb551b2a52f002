"""Starting the ranks of a training run again after a failure: whether, how often, and in which layout."""
