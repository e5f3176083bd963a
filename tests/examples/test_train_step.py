"""The script behind the table of `docs/scaling.md` prints what the table holds."""

import dataclasses
import json
import math

from examples.llama.config import PRESETS
from examples.scaling import train_step


def test_prints_one_record(capsys, monkeypatch):
    small = dataclasses.replace(PRESETS["tiny"], num_layers=1)  # to compile sooner
    monkeypatch.setitem(PRESETS, "tiny", small)
    monkeypatch.setattr(train_step, "ROUNDS", 2)
    monkeypatch.setattr(train_step, "STEPS", 2)
    train_step.main(["--preset", "tiny", "--mesh", "data=4,fsdp=2", "--magma", "--steps", "4"])
    record = json.loads(capsys.readouterr().out)
    assert record["mesh"] == {"data": 4, "fsdp": 2}
    assert (record["optimizer"], record["masking"]) == ("adam", "magma")
    # Untrained, the model is uniform over 257 bytes.
    assert abs(record["losses"][0] - math.log(257)) < 0.1
    assert record["last_loss"] < record["losses"][0]
    assert 0 < record["optimizer_ms"] and 0 < record["step_ms"]
