"""Reads the flags of a training from the shell script that launches it, without running anything."""
