"""The register is complete: every entry is true, and nothing outside of it changes a library."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

from megatron_collab import patches
from megatron_collab.patches import Patch
from tests.patches.changes import UNKNOWN, changes

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "megatron_collab"
LIBRARIES = ("torch", "megatron", "sglang", "litellm", "ray", "transformers", "multiprocessing")
patches.apply("megatron", "litellm")
REGISTER = patches.register()
NOT_HERE = ("sglang", "transformer-engine")  # libraries that a process with Megatron on a CPU does not import
# State of the process that Python documents as variables; runtime/redact.py replaces how its streams write.
DOCUMENTED_STATE = {"os.environ", "tempfile.tempdir", "sys.stdout", "sys.stderr", "sys.stderr.write"}
# They import modules of their own: files of the user, TransformerEngine with the reference kernels.
IMPORTERS = ("settings/extension.py", "rehearsal/te_cpu/imports.py")
# Names with an underscore that the language and its library document.
DOCUMENTED = {"_exit", "_current_frames", "_getframe", "_replace", "_asdict"}


def named(entries: list[Patch]) -> list[object]:
    return [pytest.param(entry, id=entry.name) for entry in entries]


def sources(*exempt: str, folder: Path = PACKAGE) -> Iterator[tuple[str, ast.Module]]:
    """All sources in `folder` but those in folders of these names."""
    for file in sorted(folder.rglob("*.py")):
        if file.parent.name not in exempt:
            yield str(file.relative_to(folder)), ast.parse(file.read_text())


def test_names_are_unique() -> None:
    assert len({entry.name for entry in REGISTER}) == len(REGISTER)


@pytest.mark.parametrize("entry", named(REGISTER))
def test_the_test_of_an_entry_exists(entry: Patch) -> None:
    file, name = entry.test.split("::")
    assert re.search(rf"^def {name}\(", (REPOSITORY / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("entry", named(REGISTER))
def test_versions_are_those_of_the_lock_files(entry: Patch) -> None:
    locks = [(REPOSITORY / "requirements" / name).read_text() for name in ("base.lock", "gpu.lock")]
    pinned = {m[1] for lock in locks if (m := re.search(rf"^{entry.library}==(.+)$", lock, re.MULTILINE))}
    assert set(patches.VERSIONS[entry.library]) == pinned


@pytest.mark.parametrize("entry", named([e for e in REGISTER if e.when() and e.library != "sglang"]))
def test_what_is_replaced_is_ours(entry: Patch) -> None:
    for attribute in (*entry.sets, *entry.wraps):
        current = resolve_name(attribute)
        ours = current in (None, True) or current.__module__.startswith(patches.__name__)
        assert ours and entry.sets.get(attribute, current) is current, attribute


@pytest.mark.parametrize("entry", named([e for e in REGISTER if e.apply is None and e.library not in NOT_HERE]))
def test_private_interfaces_exist(entry: Patch) -> None:
    for attribute in entry.uses:
        if "nccl" in attribute.lower():  # a build for CPU has none
            continue
        owner, name = attribute.rsplit(".", 1)
        resolved = resolve_name(owner)
        # pydantic keeps private attributes apart
        assert hasattr(resolved, name) or name in resolved.__private_attributes__, attribute


def test_what_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_applied", set())
    monkeypatch.setitem(sys.modules, "litellm", ModuleType("litellm"))
    with pytest.raises(RuntimeError, match=r"patches\.apply\('litellm'\) must be called before the first import"):
        patches.apply("litellm")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("import torch\ntorch.cuda.synchronize = None", "torch.cuda.synchronize"),
        ("import torch\ndel torch.compile", "torch.compile"),
        ("import torch\ntorch.compile, kept = None, 1", "torch.compile"),
        ("import torch\nfor torch.compile in (): ...", "torch.compile"),
        ("import torch\nwith open('') as torch.compile: ...", "torch.compile"),
        ("import litellm\nlitellm.custom_provider_map += []", "litellm.custom_provider_map"),
        (
            "from megatron.core import optimizer as o\nkept, o.HAVE_TE = o.HAVE_TE, True",
            "megatron.core.optimizer.HAVE_TE",
        ),
        ("import ray as r\nsetattr(r, 'init', None)", "ray.init"),
        ("import ray\ndelattr(ray, 'init')", "ray.init"),
        ("import ray\nobject.__setattr__(ray.actor, 'exit_actor', None)", "ray.actor.exit_actor"),
        ("from ray import actor\nfor name in ('a', 'b'): setattr(actor, name, None)", "ray.actor"),
        ("import torch.nn.functional as F\nvars(F)['linear'] = None", "torch.nn.functional.linear"),
        ("import torch.nn.functional as F\nF.__dict__['linear'] = None", "torch.nn.functional.linear"),
        ("import sglang\nvars(sglang).update(x=1)", "sglang"),
        ("import sys\nsys.modules['triton'] = None", "triton"),
        ("from sys import modules\nmodules.pop('triton')", "sys.modules"),
        ("import sys\nsys.modules['torch'].compile = None", "torch.compile"),
        ("from importlib import import_module as load\nload('torch').compile = None", "torch.compile"),
        (
            "from importlib import import_module\nlibrary = import_module('torch')\nlibrary.compile = None",
            "torch.compile",
        ),
        ("import torch\ncuda = torch.cuda\ncuda.synchronize = None", "torch.cuda.synchronize"),
        ("import torch\ngetattr(torch, 'cuda').synchronize = None", "torch.cuda.synchronize"),
        ("from torch import nn\nfor kind in (nn.Linear,):\n    kind.forward = None", "torch.nn.Linear.forward"),
        ("from megatron_collab.trainer import network\nnetwork.infer = None", "megatron_collab.trainer.network.infer"),
        ("import megatron_collab.types as t\nsetattr(t.Batch, 'cut', None)", "megatron_collab.types.Batch.cut"),
        ("from megatron_collab.types import Batch as B\nB.cut = None", "megatron_collab.types.Batch.cut"),
        ("from . import network\nnetwork.infer = None", "..network.infer"),
        ("from unittest import mock\nmock.patch('torch.compile', None)", "torch.compile"),
        ("from unittest import mock as m\nm.patch.object(m, 'call', None)", "unittest.mock.call"),
        ("import unittest.mock\nunittest.mock.patch.object(object(), 'name')", UNKNOWN),
        ("import unittest.mock as u\nu.patch.multiple('torch.cuda', synchronize=None)", "torch.cuda.synchronize"),
        ("from unittest.mock import patch as p\np.dict('sys.modules', triton=None)", "sys.modules"),
        ("from unittest.mock import patch\n\n@patch('torch.compile')\ndef f(): ...", "torch.compile"),
        ("def f(monkeypatch): monkeypatch.setattr('torch.compile', None)", "torch.compile"),
        ("import torch, pytest\npytest.MonkeyPatch().setattr(torch, 'compile', None)", "torch.compile"),
    ],
)
def test_a_change_is_seen(program: str, name: str) -> None:
    assert [changed for _, changed in changes(ast.parse(program))] == [name]


@pytest.mark.parametrize(
    "program",
    [
        "class A:\n    def f(self): self.x = vars(self)['y'] = 1",
        "from megatron_collab.config import Config\nconfig = Config()\nconfig.run.dir = ''",
        "import torch\nx = torch.zeros(1)\nx.grad = None\nx[0] = setattr(x, 'y', {}.update(a=1))",
        "cache = {}\ncache['torch'] = None",
    ],
)
def test_what_a_program_made_is_its_own(program: str) -> None:
    assert list(changes(ast.parse(program))) == []


@pytest.mark.processes
def test_nothing_outside_of_the_register_changes_imported_code() -> None:
    """Of libraries nothing that no entry names, and of the package nothing at all.

    The sandbox is apart: its processes run programs of the policy and their tests, under other modules' names.
    """
    listed = {name for entry in REGISTER for name in (*entry.sets, *entry.wraps, *entry.uses)} | DOCUMENTED_STATE
    places = [
        f"{file}:{line} {name}"
        for file, tree in [*sources("patches", "sandboxed"), *sources(folder=REPOSITORY / "tools")]
        for line, name in changes(tree)
        if name not in listed and not (name == "sys.modules" and file in IMPORTERS)
    ]
    assert places == []


@pytest.mark.seconds
def test_private_names_of_libraries_are_in_the_register() -> None:
    """A name with an underscore that the package reads but never defines belongs to a library.

    Those of TransformerEngine that its reference kernels use are in te_cpu alone.
    """
    defined, read = set(dir(builtins)) | DOCUMENTED, {}
    for file, tree in sources("patches", "te_cpu"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    defined.add(node.attr)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                read[node.attr] = f"{file}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                read |= {name: f"{file}:{node.lineno}" for name in private}
    listed = [name for entry in REGISTER for name in (*entry.sets, *entry.wraps, *entry.uses)]
    known = {part for name in listed for part in name.split(".")[1:]}
    assert {name: place for name, place in read.items() if name not in defined | known} == {}


def test_devices_are_named_in_one_place() -> None:
    """All other code gets devices from runtime/device.py; the choices of launch.device are beside the option.

    Three files of runtime/ are about CUDA itself: its driver, its compiler, its libraries.
    """
    naming = {PACKAGE / "runtime" / name for name in ("device.py", "driver.py", "toolkit.py", "gpu_set.py")}
    naming.add(PACKAGE / "settings" / "schema.py")
    names = [
        f"{file}:{number}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.parent.name not in ("patches", "te_cpu") and file not in naming
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if re.search(r'"cuda|torch\.cuda\.', line)
    ]
    assert names == []
