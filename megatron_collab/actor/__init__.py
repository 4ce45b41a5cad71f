"""The policy in Megatron-Core: model, update, checkpoints.

Importing the package makes Megatron-Core ready for this machine; every module of it may then import `megatron`.
"""

import warnings

from megatron_collab.actor import cpu, fixes

# Every rank would say at every start what is not installed; tools/doctor.py says it when asked.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
cpu.install()
fixes.install()
