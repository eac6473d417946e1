"""A comparison as a page that opens from disk, with its figures and a CSV beside it."""

from .page import write_csv, write_report, write_results

__all__ = ["write_csv", "write_report", "write_results"]
