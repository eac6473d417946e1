"""Command ``python -m st_reba``, for launchers of modules such as ``accelerate launch -m st_reba``."""

from st_reba_cli import app

if __name__ == "__main__":
    app(prog_name="st-reba")
