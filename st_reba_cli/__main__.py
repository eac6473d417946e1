"""Entry point of ``python -m st_reba_cli``."""

from . import app

if __name__ == "__main__":
    app(prog_name="st-reba")
