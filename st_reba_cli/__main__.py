"""``python -m st_reba_cli``: the command, which imports what is large when it runs, as the installed script does."""

from . import app

if __name__ == "__main__":
    app(prog_name="st-reba")
