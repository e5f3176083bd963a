"""The one exception that the data code raises for a mistake a person can mend."""


class DataError(ValueError):
    """Data that cannot be used; the message is one line that names the path and the fix."""


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, to quote in a `DataError`."""
    return (str(error).splitlines() or [type(error).__name__])[0]
