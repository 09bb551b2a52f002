"""Reads the shell scripts that other systems are started by."""
