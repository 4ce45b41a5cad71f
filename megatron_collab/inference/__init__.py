"""SGLang servers and their clients. Here: the variables and the flag by which a server process is started."""

KEY_VARIABLE = "MEGATRON_COLLAB_SERVER_KEY"  # the API key: command-line arguments are visible to every user of the node
PARENT_VARIABLE = "MEGATRON_COLLAB_SERVER_PARENT"  # id of the process whose end ends the server
CHECK_VARIABLE = "MEGATRON_COLLAB_SERVER_CHECK"  # JSON of the settings' arguments: they are checked, nothing is served
STACKS_VARIABLE = "MEGATRON_COLLAB_SERVER_STACKS"  # folder and name of the files with the stacks of its processes
SCORES_FLAG = "is-embedding"  # SGLang's argument for models that give no tokens, as reward models
MEETING = "megatron-collab"  # before :// of where the ranks of a server over several nodes meet

# Of a server on a CPU, read at its first product: MKL takes the same kernel however many rows there are. Without it, it
# takes another for few rows, how few depends on the processor. It takes no more time but for products of a few rows.
ROW_BY_ROW = ("MKL_CBWR", "AUTO,STRICT")
