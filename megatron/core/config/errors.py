"""Errors that the user can mend: one class, below every other module."""


class UserError(ValueError):
    """A flag, a file or an environment that the user can mend; the message is all there is to say.

    It names the flag or file, the value, the reason and the fix, and a program ends with it alone, without a
    traceback. Everything else is a bug of ours or of the user's own code and keeps its traceback.
    """

    elsewhere: bool = False
    """Another rank has the cause and says more about it."""
    reported: bool = False
    """The message has been written, by this process or by one that speaks for it."""
