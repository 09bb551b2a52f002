"""Callbacks that log to experiment trackers, whose packages are imported when they are used."""
