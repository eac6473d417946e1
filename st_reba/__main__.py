"""``python -m st_reba``: the command, for launchers that start a module, such as ``accelerate launch -m st_reba``."""

from st_reba_cli import app

if __name__ == "__main__":
    app(prog_name="st-reba")
