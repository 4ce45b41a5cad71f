"""Reproduces published comparisons: trains and evaluates the assistants of a study one after the other."""
