"""The one exception a person is meant to read."""


class UserError(ValueError):
    """Bad input, explained in one sentence that says what to do; shown as it is, without a traceback."""
