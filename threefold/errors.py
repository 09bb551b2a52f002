"""Errors that are the user's to mend, told in one sentence."""


class UserError(Exception):
    """A mistake in what the user asked for.

    The message is one sentence that names the setting, its value, the rule it breaks and the nearest value that works.
    The command line prints it once, without a traceback.
    """


class OutputLost(UserError):
    """Nobody reads standard output any more, or it is on a full disk."""


CLOSED_OUTPUT = "Standard output was closed by the program that read it."
"""The message of an `OutputLost` that ends a command without a word, as it ends other programs."""
