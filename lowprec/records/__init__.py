"""Recorded runs: the folders, how they are read and written, and what counts as an explosion."""
