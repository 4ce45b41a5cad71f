"""What SGLang lacks on a CPU: attention, sampling, and the entry point of a server."""
