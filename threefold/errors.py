"""Errors for the user to correct, each in one sentence."""


class UserError(Exception):
    """A mistake in a setting, an option or a file of the user.

    The message is one sentence that names the setting, its value, the rule it breaks and the nearest value that works.
    The command line prints it once, without a traceback.
    """


class OutputLost(UserError):
    """Standard output was closed by its reader, or is on a full disk."""


CLOSED_OUTPUT = "Standard output was closed by the program that read it."
"""The message of an `OutputLost` that ends a command silently, as it ends other programs."""
