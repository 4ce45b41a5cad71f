"""SGLang servers and their clients. This module: variables and a flag that a server process is started with."""

KEY_VARIABLE = "MEGATRON_COLLAB_SERVER_KEY"  # the API key: command-line arguments are visible to every user of the node
CLIENT_KEY_VARIABLE = "MEGATRON_COLLAB_SERVER_CLIENT_KEY"  # if set, KEY_VARIABLE is only for managing the server
PARENT_VARIABLE = "MEGATRON_COLLAB_SERVER_PARENT"  # process id; the server ends with that process
CHECK_VARIABLE = "MEGATRON_COLLAB_SERVER_CHECK"  # JSON of the settings' arguments: only check them, serve nothing
STACKS_VARIABLE = "MEGATRON_COLLAB_SERVER_STACKS"  # folder and name of the stack dumps of its processes
SCORES_FLAG = "is-embedding"  # SGLang's argument for models that return no tokens, such as reward models
MEETING = "megatron-collab"  # URL scheme of the rendezvous of a server over several nodes

# For a server on a CPU, read at its first matrix product: MKL uses the same kernel for any number of rows. By default
# it uses another kernel for few rows; how few depends on the processor. Only products of a few rows become slower.
ROW_BY_ROW = ("MKL_CBWR", "AUTO,STRICT")
