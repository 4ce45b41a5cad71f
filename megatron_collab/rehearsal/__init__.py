"""Rehearses a run rank by rank without a device: its own code runs on tensors without values, and memory is counted."""
