"""The one exception that the data code raises for a mistake a person can mend."""

_QUOTED = 200  # Characters of another exception's message.


class DataError(ValueError):
    """Data that cannot be used; the message is one line that names the path and the fix."""

    def __init__(self, message: str):
        """Keeps `message` on one line, whatever the names and excerpts in it hold."""
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    r"""Spells what cannot be printed as Python does: a line end as \n."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, to quote in a `DataError`.

    Of an error of the operating system it is the cause alone, since its message repeats the path.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0][:_QUOTED]
