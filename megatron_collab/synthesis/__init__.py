"""Builds data: conversations turn by turn, each continued from the best of several candidates."""
