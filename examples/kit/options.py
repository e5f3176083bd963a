"""Options of command lines: one-line errors, and the kinds of values that programs share."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax


class SettingsError(ValueError):
    """The settings can't be used; the message says why in one line."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line; options are not abbreviated."""

    def __init__(self, **options: Any):
        """Takes what `argparse.ArgumentParser` takes."""
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses as `argparse` does; prints what is wrong and exits with status 2."""
        try:
            return self.parse(args)
        except SettingsError as error:
            self.exit(2, f"error: {error}\n")

    def parse(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses `args`.

        Raises:
            SettingsError: If an option is wrong.
        """
        return super().parse_args(args)

    def error(self, message: str) -> NoReturn:
        """Raises SettingsError for a wrong option."""
        raise SettingsError(message)

    def refuse_idle(self, args: argparse.Namespace, beside: str, *names: str) -> None:
        """Exits with status 2 for an option that was given and does nothing beside another."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                option = f"--{name.replace('_', '-')}"
                self.exit(2, f"error: {option} does nothing {beside}; leave it out\n")


def number(
    low: float, kind: type = float, *, above: bool = False, high: float = math.inf
) -> Callable[[str], float]:
    """Returns a parser of numbers from `low` on, or `above` it, to `high`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        fits = low < value if above else low <= value
        if not (fits and value <= high and value != math.inf):
            bounds = f"{'more than' if above else 'at least'} {low}"
            bounds += " and finite" if high == math.inf else f" and at most {high}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    return parse


def whole(low: int) -> Callable[[str], float]:
    """Returns a parser of whole numbers from `low` to the largest int32."""
    return number(low, int, high=2**31 - 1)


def seconds(text: str) -> float:
    """Parses a time limit; ``inf`` is none."""
    return math.inf if text == "inf" else number(0.0)(text)


def probability(text: str) -> float | str:
    """Parses a survival probability, which may be ``alignment``."""
    return text if text == "alignment" else number(0.0, above=True)(text)


def local_path(text: str) -> Path:
    """Parses a path of the file system."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is an address; only local folders can be written, so give one, or mount "
            "the bucket and give its mount point"
        )
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    return Path(text)


def platform() -> str:
    """Returns what kind of device JAX uses.

    Raises:
        SettingsError: If it finds none.
    """
    try:
        return jax.default_backend()
    except RuntimeError as error:
        raise SettingsError(f"JAX finds no device: {error}") from None


def need(args: argparse.Namespace, met: bool, partner: str, *names: str) -> None:
    """Refuses options that do nothing without their partner.

    Raises:
        SettingsError: If one of `names` was given and the partner is not `met`.
    """
    for name in names:
        if not met and getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise SettingsError(f"{option} needs {partner}, and does nothing without; add it")


def default(args: argparse.Namespace, name: str, value: Any) -> None:
    """Sets an option that was not given."""
    if getattr(args, name) is None:
        setattr(args, name, value)


def jsonable(args: argparse.Namespace) -> dict[str, Any]:
    """Returns all options, ready for JSON."""
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
