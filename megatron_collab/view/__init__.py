"""Look at runs in a browser: `command.py` starts `server.py`, which answers what `runs.py` reads from their folders."""
