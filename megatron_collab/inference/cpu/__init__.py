"""Parts that SGLang lacks on a CPU: batch-invariant attention and adapters, and the entry point of a server."""
