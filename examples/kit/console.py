"""Printing that never ends a run.

A character that the terminal cannot show is escaped. An output that is closed (`| head -1`), full
or absent is let go: the run goes on without it, since its records are in files.
"""

import contextlib
import os
import sys
import unicodedata


class Output:
    """What `sys.stdout` or `sys.stderr` is at the moment, as a stream that cannot fail."""

    def __init__(self, name: str):
        """Takes the stream's name in `sys`."""
        self._name = name

    def __getattr__(self, name: str) -> object:
        """Looks up the stream's encoding, size and so on, for tqdm."""
        return getattr(getattr(sys, self._name), name)

    def write(self, text: str) -> int:
        """Writes `text`, or as much of it as can be written."""
        stream = getattr(sys, self._name)
        with self._failure_lets_go():
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoded = text.encode(stream.encoding, "backslashreplace")
                stream.write(encoded.decode(stream.encoding))
        return len(text)

    def flush(self) -> None:
        """Passes on what was written."""
        with self._failure_lets_go():
            getattr(sys, self._name).flush()

    @contextlib.contextmanager
    def _failure_lets_go(self):
        try:
            yield
        except BlockingIOError:  # a terminal that is slow at the moment
            pass
        except (OSError, ValueError, AttributeError):  # broken, closed or None
            # What is still buffered goes nowhere, or the interpreter's end would fail with it.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, getattr(sys, self._name).fileno())
                os.close(nowhere)


stdout, stderr = Output("stdout"), Output("stderr")


def say(*parts: object) -> None:
    """Prints like `print`, at once."""
    print(*parts, file=stdout, flush=True)


def print_error(message: str) -> None:
    """Prints what ends the program, as one line."""
    print(f"error: {one_line(message)}", file=stderr, flush=True)


def print_warning(message: str) -> None:
    """Prints what the reader should know and need not act on, as one line."""
    print(f"warning: {one_line(message)}", file=stderr, flush=True)


def one_line(message: str) -> str:
    """Returns `message` without line breaks and control characters."""
    return printable(" ".join(message.split()))


def printable(text: str) -> str:
    """Returns `text` with its control characters escaped, but for line breaks and tabs."""
    return "".join(
        ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )
