"""Calls of C library functions that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a C function that returns -1 and sets errno if it fails. Raises OSError with its name."""
    if getattr(_libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
