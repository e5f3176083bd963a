"""Files as they lie on disk: found through links, and refused by name where they cannot be read."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from examples.kit.data.digest import digest
from examples.kit.data.error import DataError, first_line

_END = 4096  # Bytes.
_GZIP_END = 8  # Of which four are a checksum of the content, and four its size.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def find_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the files below a folder whose names end with one of `suffixes`, sorted.

    Linked folders are read like others, but each folder once, so that a link to a folder around it
    is no loop. Folders whose names begin with a dot are left out.

    Args:
        folder: An existing folder.
        suffixes: Endings of names, such as ".txt".

    Raises:
        DataError: If a folder cannot be listed, if what ends with a suffix is neither a file nor a
            folder, or if a link with such an ending, or without any, leads nowhere.
    """
    found: list[Path] = []
    seen: set[str] = set()
    ahead = [folder]
    links: list[Path] = []  # Read last: what is also below `folder` itself has its name there.
    while ahead or links:
        place = ahead.pop() if ahead else links.pop(0)
        where = os.path.realpath(place)
        if where in seen:
            continue
        seen.add(where)
        for entry in _entries(place):
            path = place / entry.name
            wanted = entry.name.endswith(suffixes)
            if not wanted and (entry.name.startswith(".") or not _may_be_folder(entry)):
                continue
            mode = read_status(path).st_mode
            if stat.S_ISDIR(mode):
                if not entry.name.startswith("."):
                    (links if entry.is_symlink() else ahead).append(path)
            elif wanted:
                require_file(path)
                found.append(path)
    return sorted(found)


def is_there(path: Path) -> bool:
    """Says whether something has this name, be it a link that leads nowhere: it stands for data.

    Raises:
        DataError: If its folder may not be entered.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name.
        return False
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)})") from error
    return True


def read_status(path: Path) -> os.stat_result:
    """Returns the status of what `path` leads to.

    Raises:
        DataError: If there is nothing there, or it is out of reach.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            to = os.readlink(path)
            raise DataError(f"{path}: a link to {to}, which is not there; mend it") from error
        raise DataError(
            f"{path}: no such file or folder; give a text file or a folder of them"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name.
        raise DataError(f"{path}: cannot be read ({first_line(error)})") from error


def require_file(path: Path) -> int:
    """Returns the size of a file in bytes.

    Raises:
        DataError: If it is no file, such as a folder or a pipe, or is out of reach.
    """
    status = read_status(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise DataError(f"{path}: {kind}, not a file; put a file there")
    return status.st_size


def fingerprint(path: Path) -> str:
    """Returns what changes with the content of a file, without reading all of it.

    That is its size and a digest of its end: of gzip the checksum, but not the time that stands at
    its beginning; of other formats what comes last, as Parquet's places and statistics.

    Raises:
        DataError: If it is empty, is no file or cannot be read.
    """
    size = require_file(path)
    if size == 0:
        raise DataError(f"{path}: empty (0 bytes); fetch it again, or remove it")
    end = min(size, _GZIP_END if path.suffix == ".gz" else _END)
    return f"{size} {digest([read_bytes(path, size - end)])}"


def read_bytes(path: Path, start: int = 0, size: int = -1) -> bytes:
    """Returns `size` bytes of a file from `start` on, by default all.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)})") from error


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return iter(sorted(entries, key=lambda entry: entry.name))
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be read ({first_line(error)}); make it readable, or move it away"
        ) from error


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    """Says whether to follow an entry without a fitting suffix: a folder, or a link to one.

    A link that leads nowhere counts, as it may have led to a folder, unless it is named like a
    file of another kind.
    """
    if not entry.is_symlink():
        return entry.is_dir()
    return os.path.isdir(entry.path) or not os.path.splitext(entry.name)[1]
