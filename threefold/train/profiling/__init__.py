"""Profiles of some steps of a run: a trace of each rank for Perfetto, and when each pipeline stage did what."""
