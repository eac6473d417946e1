"""The former name of :mod:`st_reba.serve` and :mod:`st_reba.verify`, with warnings in its files."""
