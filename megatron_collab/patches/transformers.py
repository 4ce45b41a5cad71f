"""Patches of Transformers, which also Megatron-Core and SGLang import: a faster import, and its chat templates."""

from __future__ import annotations

import csv
import inspect
from collections import defaultdict
from importlib.metadata import Distribution, distributions

from megatron_collab.patches import Patch


def packages_distributions() -> dict[str, list[str]]:
    """importlib.metadata's function of this name, but every file that was installed counts as still there."""
    names = defaultdict(list)
    for distribution in distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        for package in declared or _packages(distribution):
            names[package].append(distribution.metadata["Name"])
    return dict(names)


def _packages(distribution: Distribution) -> set[str]:
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    paths = (row[0].partition("/") for row in rows)
    packages = {top if submodule else inspect.getmodulename(top) or top for top, _, submodule in paths}
    return {package for package in packages if "." not in package}


PATCHES = (
    Patch(
        "transformers",
        "no look at every installed file",
        why="At its import Transformers asks which distribution each package is from. From Python 3.12 on that checks "
        "each of 30,000 files: 1 to 2 s in every process.",
        upstream="transformers/utils/import_utils.py:51 (PACKAGE_DISTRIBUTION_MAPPING)",
        until="Transformers asks about the few packages that it looks up",
        test="tests/patches/test_transformers.py::test_transformers_checks_no_installed_files",
        sets={"importlib.metadata.packages_distributions": packages_distributions},
    ),
    Patch(
        "transformers",
        "syntax, filters and globals of chat templates",
        why="Renderings during a run are bounded (settings/bounded_jinja.py) and otherwise equal to Transformers' own.",
        upstream="transformers/utils/chat_template_utils.py:413 (_compile_jinja_template)",
        until="Transformers has a public function for the environment of chat templates, or bounds their renderings",
        test="tests/data/test_chat_template.py::test_a_rendering_is_bounded",
        uses=("transformers.utils.chat_template_utils._compile_jinja_template",),
    ),
)
