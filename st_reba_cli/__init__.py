"""The ``st-reba`` command: one file a subcommand."""

from .command import app as app
