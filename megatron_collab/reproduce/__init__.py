"""Reproduces published comparisons: trains and evaluates the assistants of a study."""
