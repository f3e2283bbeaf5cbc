"""The one error that a user can cause."""


class UserError(ValueError):
    """One sentence: what is wrong, where, and what would work. The command line prints it and exits with 2."""
