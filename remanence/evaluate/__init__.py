"""Evaluation: the papers' experiments as tasks in `TASKS`, with the memory on, off, frozen or fresh."""

from remanence.evaluate.babilong import Babilong
from remanence.evaluate.commonsense import Commonsense
from remanence.evaluate.grid import Ablate, Depth
from remanence.evaluate.lm import Lm
from remanence.evaluate.niah import Niah
from remanence.evaluate.recall import Recall
from remanence.evaluate.run import evaluate, provenance, write_rows
from remanence.evaluate.subject import Subject
from remanence.evaluate.task import Row, Task, configured
from remanence.evaluate.wikitext_lambada import Lambada, Wikitext
from remanence.verticals import Registry, evaluations

TASKS: Registry[type[Task]] = Registry(
    {
        **{task.name: task for task in (Lm, Wikitext, Lambada, Niah, Babilong, Recall, Commonsense)},
        **evaluations(),
        **{task.name: task for task in (Ablate, Depth)},
    }
)
"""Evaluation tasks by name, including those that verticals such as DNA and forecasting register."""

__all__ = ["TASKS", "Row", "Subject", "Task", "configured", "evaluate", "provenance", "write_rows"]
