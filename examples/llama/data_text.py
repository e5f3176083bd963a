"""Documents that fit in memory: text files, and the standard library that comes with Python.

Both are a dict of name to texts. What shares a name falls on the same side of the held-out split.
"""

import hashlib
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from examples.llama.data_error import DataError

SUFFIXES = (
    *(".txt", ".md", ".rst", ".tex"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".go", ".java", ".jl", ".js", ".rs", ".sh", ".ts"),
)
HELD_OUT = 0.05

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


def read_files(path: Path) -> dict[str, list[str]]:
    """Reads a text file, or every file of a folder whose suffix is in `SUFFIXES`.

    Args:
        path: An existing file, or a folder, which is searched to the bottom but for hidden folders.

    Returns:
        The text of each file by its name; files of white space alone are left out.

    Raises:
        DataError: If no file has a fitting suffix, one cannot be read as text, or all are empty.
    """
    files = sorted(_text_files(path)) if path.is_dir() else [path]
    if not files:
        raise DataError(
            f"{path}: no train.bin, *.json.gz or text files in it; text is {' '.join(SUFFIXES)}"
        )
    texts = {file.relative_to(path).as_posix(): [_read(file)] for file in files}
    texts = {name: [text] for name, [text] in texts.items() if text.strip()}
    if not texts:
        raise DataError(f"{path}: empty; put some text in it")
    return texts


def read_standard_library() -> tuple[str, dict[str, list[str]]]:
    """Reads the English and the code that every Python installation carries.

    Prose is the language reference behind `help()` and the docstrings; code is the sources that
    the docstrings were cut from. A file's prose and code share its name.

    Returns:
        What to call the texts, and the texts by name. Both depend on the Python version alone.

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

    About `HELD_OUT` of the characters are held out by whole names, chosen by a hash. Where no name
    is small enough, as with a single file, the last `HELD_OUT` of every text is held out.

    Args:
        groups: Texts by name.

    Returns:
        The training texts and the held-out texts.
    """
    sizes = {name: sum(map(len, texts)) for name, texts in groups.items()}
    room = HELD_OUT * sum(sizes.values())
    held_out = set()
    for name in sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= room:
            held_out.add(name)
            room -= sizes[name]
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


def _text_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if name.endswith(SUFFIXES))


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    head = content[: 1 << 13]
    if b"\0" in head or head.decode(errors="replace").count("\ufffd") > len(head) // 10:
        raise DataError(f"{file}: not a text file; text is UTF-8, as in {' '.join(SUFFIXES)}")
    return content.decode(errors="replace")


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
