"""Print pip constraints that pin every dependency to its lower bound."""

import pathlib
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())
project = project["project"]
extras = [r for name in ("examples", "hf", "test") for r in project["optional-dependencies"][name]]
for requirement in [*project["dependencies"], *extras]:
    if ">=" in requirement:
        print(requirement.replace(">=", "=="))
