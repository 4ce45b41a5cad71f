"""Makes Megatron-Core ready for this machine: imported before any module that imports `megatron`."""

import warnings

from megatron_collab.patches import cpu, megatron

# Every rank would say at every start what is not installed; tools/doctor.py says it when asked.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
# Megatron-Core 0.16.1 calls collectives by names that torch 2.13 deprecates, and looks at gradients it does not keep.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
cpu.install()
megatron.install()
