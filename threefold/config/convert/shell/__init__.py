"""A reader for the shell scripts that launch trainings of other systems; it runs nothing."""
