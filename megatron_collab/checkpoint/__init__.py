import megatron_collab.patches.megatron_ready  # noqa: F401 (before anything imports Megatron-Core)
