"""An experiment: arms that are compared on a task."""

import dataclasses
import importlib
from collections.abc import Mapping

from examples.paper.arms import Arm
from examples.paper.trainer import Task


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a process must know to train any of an experiment's runs.

    Attributes:
        module: The module that has it as ``EXPERIMENT``.
        task: The class of its tasks.
        arms: All its arms, by name.
    """

    module: str
    task: type[Task]
    arms: Mapping[str, Arm]


def find(module: str) -> Experiment:
    """Returns the experiment of a module."""
    return importlib.import_module(module).EXPERIMENT
