"""Names of environment variables that a server is started with."""

KEY_VARIABLE = "MEGATRON_COLLAB_SERVER_KEY"  # arguments would show it to every user of the machine
PARENT_VARIABLE = "MEGATRON_COLLAB_SERVER_PARENT"  # the process that it ends with
STACKS_VARIABLE = "MEGATRON_COLLAB_SERVER_STACKS"  # where its processes write their stacks: folder and name
