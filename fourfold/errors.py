"""The one error that a user can cause."""


class UserError(ValueError):
    """What is wrong, where, and what would work, in one sentence; the command line prints it and exits with 2."""
