"""Any task of the mteb package, for many readings of one language model."""

from .run import TaskScore, TaskScores, compare_tasks, mteb_estimates, run_tasks
from .samples import score_items
from .tasks import language_of_tasks, resolve_tasks

__all__ = [
    "TaskScore",
    "TaskScores",
    "compare_tasks",
    "language_of_tasks",
    "mteb_estimates",
    "resolve_tasks",
    "run_tasks",
    "score_items",
]
