"""megatron-collab: train language models to collaborate over many turns."""

__version__ = "0.2.0"
