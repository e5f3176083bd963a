"""Print the README's command that has a given word in it."""

import pathlib
import re
import sys

readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
[command] = [c for c in re.findall(r"^```sh\n(.*?)^```", readme, re.M | re.S) if sys.argv[1] in c]
print(command)
