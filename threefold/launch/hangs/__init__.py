"""Hangs: which rank does not answer, from the heartbeats of all, on one host and over a launcher's store."""
