"""Commands about a run and its report."""
