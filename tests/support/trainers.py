"""What the tests of the two trainers share."""

import random

WORDS = "the a mask of update moment gradient block keeps drops moves layer each every some".split()


def write_corpus(folder):
    """Writes 800 lines of ten words and returns their path."""
    path = folder / "text.txt"
    words = random.Random(0).choices(WORDS, k=8000)
    lines = (" ".join(words[i : i + 10]) for i in range(0, len(words), 10))
    path.write_text("\n".join(lines))
    return path


def refusal(capsys, main, argv):
    """Runs a trainer that refuses its options and returns its one line of error."""
    try:
        status = main(argv)
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]
