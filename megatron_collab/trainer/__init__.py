"""The policy in Megatron-Core: model, update, checkpoints.

Importing the package makes Megatron-Core ready for this machine; every module of it may then import `megatron`.
"""

import warnings

from megatron_collab.actor import cpu, fixes

# Every rank would say at every start what is not installed; tools/doctor.py says it when asked.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
# Megatron-Core 0.16.1 calls collectives by names that torch 2.13 deprecates, and looks at gradients it does not keep.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
cpu.install()
fixes.install()
