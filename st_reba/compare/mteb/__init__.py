"""Any task of the mteb package, for many readings of one language model."""

from .intervals import mteb_estimates, score_statistic
from .run import TaskScore, TaskScores, run_tasks
from .tasks import language_of_tasks, resolve_tasks

__all__ = [
    "TaskScore",
    "TaskScores",
    "language_of_tasks",
    "mteb_estimates",
    "resolve_tasks",
    "run_tasks",
    "score_statistic",
]
