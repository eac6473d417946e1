"""The former place of methods, each of which has a file of :mod:`st_reba.modules` now; these files warn."""
