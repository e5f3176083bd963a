"""What Ctrl-C and SIGTERM do: one line instead of a traceback, or an orderly end of a loop.

This module imports nothing that is slow, so that a program can call `end_at_once` first.
"""

import collections
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_receive: Callable[[int, str], None] | None = None  # for a program that called `end_at_once`
_ending = threading.Lock()  # taken by the first to end the process


def end_at_once() -> None:
    """From now on, Ctrl-C ends this program with one line and status 130.

    For a program's own `if __name__ == "__main__"`, before its slow imports. A thread hears of each
    signal too, since Python's handlers don't run while the main thread waits inside a library.
    """
    global _receive
    _receive = _end
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    threading.Thread(target=_listen, args=(readable,), daemon=True).start()
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _pass_on)


class StopSignal:
    """Notes the first SIGTERM or SIGINT while in use, so that a loop can end between two steps.

    The second one ends the program at once. Where `end_at_once` was not called, as in a notebook,
    it raises KeyboardInterrupt instead. Outside the main thread, which alone gets signals, nothing
    is noted.

    Args:
        lost: Says what a second signal loses.
        several_hosts: `jax.distributed` looks after SIGTERM, and is sent one for a SIGINT.

    Attributes:
        number: The first signal, or None.
    """

    def __init__(self, lost: Callable[[], str], several_hosts: bool = False):
        self.number: int | None = None
        self._lost = lost
        self._several_hosts = several_hosts
        self._heard = collections.Counter[str]()
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        global _receive
        if threading.current_thread() is not threading.main_thread():
            return self
        handler = self._handle
        if _receive:
            _receive, handler = self._note, _pass_on
        for number in (signal.SIGINT,) if self._several_hosts else (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        global _receive
        if self._before and _receive:
            _receive = _end
        for number, handler in self._before.items():
            if handler is not None:  # it was not Python's
                signal.signal(number, handler)

    def _note(self, number: int, by: str) -> None:
        self._heard[by] += 1
        if max(self._heard.values()) > 1:  # both may hear of one signal, or one alone
            _leave(number, f"\nerror: {_name(number)}: {self._lost()}")
        elif self.number is None:
            self._stop(number)
            _print(f"\n{_name(number)}: stopping; once more ends at once")

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt(self._lost())
        self._stop(number)

    def _stop(self, number: int) -> None:
        self.number = number
        if self._several_hosts:
            os.kill(os.getpid(), signal.SIGTERM)


def _end(number: int, by: str) -> None:
    _leave(number, f"error: {_name(number)}: ended before it was done")


def _leave(number: int, message: str) -> None:
    """Ends the process with the status that shells expect, once however many threads ask for it."""
    if _ending.acquire(blocking=False):
        _print(message)
        os._exit(128 + number)


def _print(message: str) -> None:
    """Prints past Python's buffers, which the code that was interrupted may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode(errors="backslashreplace"))


def _name(number: int) -> str:
    return signal.Signals(number).name


def _pass_on(number: int, _: FrameType | None) -> None:
    _receive(number, "handler")


def _listen(readable: int) -> None:
    while numbers := os.read(readable, 1):
        _receive(numbers[0], "thread")
