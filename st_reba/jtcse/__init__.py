"""The former place of what :mod:`st_reba.training` and :mod:`st_reba.evaluation` hold, with warnings in its files."""
