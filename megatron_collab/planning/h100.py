"""Rates of an H100 SXM and of its links, per second, for estimates on paper.

Data sheets: NVIDIA H100 Tensor Core GPU (3.35 TB/s of HBM3; NVLink 4 with 900 GB/s, 450 in one direction), NVIDIA
ConnectX-7 (400 Gbit/s, one adapter for each GPU, as in a DGX H100). Links are assumed to reach 90 % of these rates.
Arithmetic is measured, as docs/gpu.md reports it: `python tools/bench/gpu.py`, one H100, 2026-11-26; PEAK is the data
sheet's, in bfloat16 without sparsity, by which model FLOPs utilization (mfu) is usually reported.
"""

from __future__ import annotations

HBM = 3.35e12  # bytes read or written
COPY = 1.5e12  # bytes copied within a GPU, each read and written
NODE = 400e9  # bytes to another GPU of the node, in one direction
NETWORK = 45e9  # bytes to a GPU of another node, in one direction
PEAK = 989e12  # operations in bfloat16, the denominator of `mfu`; products of matrices were measured at 784e12
LAYERS = 282e12  # operations of training steps in bfloat16: `mfu` 0.29
FP8_TIME = 0.90  # seconds of a step with FP8 in blocks over one in bfloat16
