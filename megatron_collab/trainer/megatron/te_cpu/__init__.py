"""TransformerEngine's own Python on a machine without a GPU, over reference kernels: for tests and the rehearsal.

TransformerEngine has a Python part, which decides what is computed, and a compiled one, `transformer_engine_torch`,
which computes it on a GPU. `install.install` puts a stand-in in the place of the compiled part: each kernel that a
model of this package needs, in plain torch, and a refusal by name for every other. No run installs it: a run on a CPU
has the layers of layers.py.
"""
