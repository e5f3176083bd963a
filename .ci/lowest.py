"""Print pip constraints that pin every dependency to its lower bound.

With the argument `library`, those of the library alone: an extra may want a newer version.
"""

import pathlib
import re
import sys
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())
project = project["project"]
requirements = project["dependencies"]
if sys.argv[1:] != ["library"]:
    for name in ("examples", "hf", "test"):
        requirements = [*requirements, *project["optional-dependencies"][name]]
# An extra comes after the library; its bound is the higher one.
pins = dict(re.findall(r"^([\w-]+)>=([\w.]+)", "\n".join(requirements), re.M))
for name, version in pins.items():
    print(f"{name}=={version}")
