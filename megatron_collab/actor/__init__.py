"""The policy in Megatron-Core: model, update, checkpoints.

Importing the package makes Megatron-Core ready for this machine; every module of it may then import `megatron`.
"""

from megatron_collab.actor import cpu, fixes

cpu.install()
fixes.install()
