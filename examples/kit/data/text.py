"""Documents that fit in memory: text files, and the standard library that comes with Python.

Both are a dict of name to texts. What shares a name falls on the same side of the held-out split.
"""

import codecs
import dataclasses
import hashlib
import inspect
import io
import itertools
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from examples.kit.data.error import DataError
from examples.kit.data.files import find_files, read_bytes
from examples.kit.data.kind import kind_of

SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".go", ".java", ".jl", ".js", ".rs", ".sh", ".ts"),
)
LINES = (".jsonl", ".jsonl.gz")  # Documents, which are read one file at a time.
HELD_OUT = 0.05

_WINDOW = 1 << 13  # Bytes of which a tenth may be no UTF-8; of a whole file, a hundredth.
_FEW = 10  # Bytes that may be no UTF-8 in any file.
_MAX_LIBRARY_CHARACTERS = 12_000_000
# Test suites, what is not Python's own, tables of character codes, and the topics, read apart.
_NOT_READ = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    | {"encodings", "pydoc_data"}
)
# Any triple-quoted string, so that its end is not taken for a beginning; `indent` matches, maybe
# with nothing, only where the string opens its line, as docstrings do.
_TRIPLE_QUOTED = re.compile(
    r"(?P<indent>^[ \t]*)?(?<![\w\"'])[rRuUbBfF]{0,2}"
    r"(?P<quotes>\"\"\"|''')(?P<body>(?:\\.|[^\\])*?)(?P=quotes)",
    re.MULTILINE | re.DOTALL,
)


def read_files(path: Path) -> tuple[str, dict[str, list[str]]]:
    """Reads a text file, or every file of a folder whose suffix is in `SUFFIXES`.

    Args:
        path: An existing file, or a folder, which is searched to the bottom but for hidden folders.

    Returns:
        What to call the texts, and the text of each file by its name. Files of white space alone
        are left out; the name says how many, how many bytes were no UTF-8 and are replaced, and
        how many files of JSON lines in the folder are not read.

    Raises:
        DataError: If no file has a fitting suffix, one cannot be read as text, or all are empty.
    """
    found = find_files(path, SUFFIXES + LINES) if path.is_dir() else [path]
    lines = [file for file in found if path.is_dir() and file.name.endswith(LINES)]
    files = [file for file in found if file not in set(lines)]
    if not files and lines:
        raise DataError(
            f"{path}: *.jsonl files are read one at a time; name one, such as {lines[0].name}, or "
            f"give hf:{path}"
        )
    if not files:
        raise DataError(
            f"{path}: no train.bin, *.json.gz or text files in it; text is {' '.join(SUFFIXES)}"
        )
    read = {file.relative_to(path).as_posix(): _read(file) for file in files}
    texts = {name: [one.text] for name, one in read.items() if one.text.strip()}
    if not texts:
        raise DataError(f"{path}: empty; put some text in it")
    size = sum(len(text) for [text] in texts.values())
    notes = [f"{path}: {_count(len(texts), 'file')}, {size / 1e6:.1f} MB"]
    if empty := len(read) - len(texts):
        notes.append(f"{_count(empty, 'empty file')} left out")
    if replaced := sum(one.replaced for one in read.values()):
        notes.append(f"{_count(replaced, 'byte')} outside UTF-8 replaced")
    if lines:
        notes.append(f"{_count(len(lines), '*.jsonl file')} not read")
    return ", ".join(notes), texts


def read_standard_library() -> tuple[str, dict[str, list[str]]]:
    """Reads the English and the code that every Python installation carries.

    Prose is the language reference behind `help()` and the docstrings; code is the sources that
    the docstrings were cut from. A file's prose and code share its name.

    Returns:
        What to call the texts, and the texts by name. Both depend on the Python version and on the
        options that this Python was built with, which one of its files lists.

    Raises:
        DataError: If this Python comes without sources.
    """
    texts = {f"topic {name}": [text] for name, text in sorted(_topics().items())}
    size = sum(len(text) for [text] in texts.values())
    root = Path(sysconfig.get_path("stdlib"))
    files = 0
    for file in _library_files(root):
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        size += len(source)
        if size > _MAX_LIBRARY_CHARACTERS:
            break
        parts = [part for part in split_docstrings(source) if part.strip()]
        if parts:
            texts[file.relative_to(root).as_posix()] = parts
            files += 1
    if not files:
        raise DataError(f"{root}: this Python carries no sources; give a text with --data PATH")
    size = sum(len(text) for group in texts.values() for text in group)
    version = platform.python_version()
    return f"Python {version} standard library: {files} files, {size / 1e6:.1f} MB", texts


def hold_out(groups: Mapping[str, list[str]]) -> tuple[list[str], list[str]]:
    """Splits texts into training and held-out ones.

    About `HELD_OUT` of the characters are held out by whole names, chosen by a hash. Where names
    that are small enough make less than half of that, as with a single file or a note beside a
    large one, the last `HELD_OUT` of every text is held out instead.

    Args:
        groups: Texts by name.

    Returns:
        The training texts and the held-out texts.
    """
    sizes = {name: sum(map(len, texts)) for name, texts in groups.items()}
    wanted = room = HELD_OUT * sum(sizes.values())
    held_out = set()
    for name in sorted(groups, key=_hash):
        if sizes[name] <= room:
            held_out.add(name)
            room -= sizes[name]
    if room > wanted / 2:
        held_out = set()
    train = [text for name, texts in groups.items() if name not in held_out for text in texts]
    if held_out:
        return train, [text for name in groups if name in held_out for text in groups[name]]
    cuts = [len(text) - round(HELD_OUT * len(text)) for text in train]
    heads = [text[:cut] for text, cut in zip(train, cuts, strict=True)]
    tails = [text[cut:] for text, cut in zip(train, cuts, strict=True)]
    return heads, [tail for tail in tails if tail]


def split_docstrings(source: str) -> tuple[str, str]:
    """Parts Python source into its prose and its code.

    Args:
        source: Text of a Python file.

    Returns:
        The docstrings, a blank line between each two, and the source without them.
    """
    prose = []

    def cut(match: re.Match[str]) -> str:
        if match["indent"] is None:
            return match[0]
        prose.append(inspect.cleandoc(match["body"]))
        return ""

    code = _TRIPLE_QUOTED.sub(cut, source)
    return "\n\n".join(filter(None, prose)), code


@dataclasses.dataclass(frozen=True)
class _Read:
    """A text, and how many replacement characters stand in it for bytes that are no UTF-8."""

    text: str
    replaced: int


def _read(file: Path) -> _Read:
    content = read_bytes(file)
    if kind := kind_of(content):
        raise DataError(f"{file}: not a text file, but {kind}")
    if (place := content.find(b"\0")) >= 0:
        raise _no_text(file, content, place)
    if _are_records(content):
        raise DataError(
            f"{file}: JSON records, not prose; write one record a line into a *.jsonl file, which "
            "is read as documents, or move it away"
        )
    try:
        return _Read(content.decode(), 0)
    except UnicodeDecodeError as error:
        first, replaced = error.start, _count_invalid(content)
    if replaced > max(_FEW, len(content) // 100):
        raise _no_text(file, content, first)
    for start in range(0, len(content), _WINDOW):
        window = content[start : start + _WINDOW]
        if _count_invalid(window) > max(_FEW, len(window) // 10):
            raise _no_text(file, content, start)
    return _Read(content.decode(errors="replace"), replaced)


def _no_text(file: Path, content: bytes, place: int) -> DataError:
    line = content.count(b"\n", 0, place) + 1
    return DataError(
        f"{file}: line {line}: not a text file, or a damaged one; text is UTF-8, as in "
        f"{' '.join(SUFFIXES)}"
    )


def _count_invalid(content: bytes) -> int:
    found = content.decode(errors="replace").count("\ufffd")
    return found - content.count("\ufffd".encode())  # Some are written there.


def _are_records(content: bytes) -> bool:
    """Says whether a file is JSON lines, or a JSON array, of records: alike, or with a "text"."""
    start = content[:_WINDOW].removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    try:
        if start == b"{":
            lines = (line for line in io.BytesIO(content) if line.strip())
            records = [json.loads(line) for line in itertools.islice(lines, 2)]
        elif start == b"[":
            records = json.loads(content)[:2]
        else:
            return False
    except (ValueError, RecursionError):
        return False
    if not records or not all(isinstance(record, dict) for record in records):
        return False
    alike = len(records) == 2 and records[0].keys() == records[1].keys()
    return alike or all("text" in record for record in records)


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # Some systems ship it apart.
        return {}
    return topics


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_READ)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
