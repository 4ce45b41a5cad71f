"""Transformers learns the distributions of all packages, and looks at no installed file for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.metadata, os, sys
from pathlib import Path
from megatron_collab import patches

library, checks = importlib.metadata.packages_distributions, []
stat = Path.stat
Path.stat = lambda *arguments, **options: checks.append(1) or stat(*arguments, **options)
patches.apply()
import transformers
ours, number, theirs = importlib.metadata.packages_distributions(), len(checks), library()
print(number, all(sorted(ours[name]) == sorted(theirs[name]) for name in ours | theirs))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_transformers_checks_no_installed_files() -> None:
    """On Python 3.12 the library's own function checks each of more than 30,000."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    checks, equal = done.stdout.split()
    assert equal == "True" and int(checks) < 1000, done.stderr
