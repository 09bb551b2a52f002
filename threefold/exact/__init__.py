"""Exact runs: arithmetic whose bits no layout, number of threads or kernel decides."""
