"""Runs TransformerEngine's Python code without a GPU, on reference kernels: for tests and the rehearsal.

TransformerEngine has a Python part, which decides what is computed, and a compiled part, `transformer_engine_torch`,
which computes it on a GPU. `install.install` replaces the compiled part: kernels that this package's models need are
written in plain torch; every other raises NotImplementedError with its name. No run installs it: a run on a CPU uses
the layers of trainer/megatron/layers.py.
"""
