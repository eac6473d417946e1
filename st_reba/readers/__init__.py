"""The former name of :mod:`st_reba.reading`, with warnings in its files."""
