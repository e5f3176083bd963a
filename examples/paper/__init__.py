"""The paper's experiments: a file for each figure, table and section, named after it."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"  # one file of records for each experiment
