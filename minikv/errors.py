"""The one kind of error that is the user's to mend."""


class InputError(ValueError):
    """Bad input: one line that says what was wrong, what was found and what is accepted.

    The command line prints it without a traceback and exits with code 2; in Python it is an ordinary
    ``ValueError``.
    """
