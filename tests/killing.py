"""The simulated end of a process."""


class KilledError(BaseException):
    """Not caught by any handler, like SIGKILL."""
