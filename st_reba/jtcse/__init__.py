"""JTCSE: the losses of two towers, their training, and the paper's measure.

What is public is where its like is: ``st_reba.TwinTower``, ``st_reba.losses``, ``st_reba.training``,
``st_reba.evaluation``. Its files stand on the floors of those.
"""
