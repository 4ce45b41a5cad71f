"""Estimates on paper, of memory, weight syncs and calls to language models; this module imports nothing heavy."""

GPU_GIB = 79.6  # of an H100 with 80 GB: 81,559 MiB, as nvidia-smi reports it
