"""Matplotlib's figures for files, whatever MPLBACKEND says.

A notebook names a backend there that other environments lack, and matplotlib then fails as it is
imported. A `Figure` made without pyplot is drawn by Agg and needs none. Import matplotlib's names
from here, so that this comes first.
"""

import contextlib
import os
import sys

if "matplotlib" not in sys.modules and (backend := os.environ.get("MPLBACKEND")):
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    os.environ["MPLBACKEND"] = backend
    with contextlib.suppress(ValueError):  # what else is drawn in this process may want it
        matplotlib.rcParams["backend"] = backend

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

__all__ = ["Axes", "Figure", "SubFigure", "colormaps"]
