"""Valid command lines of every command, and the ways in which bad_input.py makes nonsense of them."""
