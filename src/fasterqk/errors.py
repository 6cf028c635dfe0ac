"""The one exception that means: the caller's input is wrong, and here is how to mend it."""


class InputError(ValueError):
    """Bad input, said in one line that quotes it.

    The command line prints the message and exits with code 2; library users catch it as the
    ``ValueError`` it is. Anything else that escapes is a bug in fasterqk.
    """
