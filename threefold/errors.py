"""Errors that are the user's to mend, told in one sentence."""


class UserError(Exception):
    """A mistake in what the user asked for.

    The message is one sentence that names the setting, its value, the rule it breaks and the nearest value that works.
    The command line prints it once, without a traceback.
    """
