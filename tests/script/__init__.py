"""The command as it is typed: the wheel, installed where there is no source tree, and its script."""
