"""A cluster on one simulated clock: Ray, SGLang servers, users and judges; for timeline.py and futures.py."""
