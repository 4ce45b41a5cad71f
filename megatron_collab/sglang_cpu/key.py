"""Where the server finds its API key: arguments would show it to every user of the machine."""

KEY_VARIABLE = "MEGATRON_COLLAB_SERVER_KEY"
