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

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "megatron_collab"
LIBRARIES = ("torch", "megatron", "sglang", "litellm", "ray", "transformers", "multiprocessing")
patches.apply("megatron", "litellm")
REGISTER = patches.register()
# Names with an underscore that the language and its library document.
DOCUMENTED = {"_exit", "_current_frames", "_replace", "_asdict"}


def named(entries: list[Patch]) -> list[object]:
    return [pytest.param(entry, id=entry.name) for entry in entries]


def sources() -> Iterator[tuple[str, ast.Module]]:
    """All sources but the register itself and te_cpu, with which tests and the rehearsal simulate a GPU."""
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.parent.name not in ("patches", "te_cpu"):
            yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text())


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


@pytest.mark.parametrize("entry", named([e for e in REGISTER if e.apply is None and e.library != "sglang"]))
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


def bound_to_libraries(tree: ast.Module) -> set[str]:
    """Names that an import binds to a library, or to a part of one."""
    result = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [(alias.asname or alias.name, node.module) for alias in node.names]
        else:
            continue
        result |= {bound for bound, source in names if source.split(".")[0] in LIBRARIES}
    return result


def root(node: ast.expr) -> str | None:
    """The name at the left end of `a.b[c].d`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
        return root(node.args[0])
    return node.id if isinstance(node, ast.Name) else None


def changes(tree: ast.Module) -> Iterator[int]:
    """Lines that set an attribute or an item of a library, or of sys.modules, by any of the usual ways."""
    bound = bound_to_libraries(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if root(node.args[0]) in bound:
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            value = node.func.value
            if isinstance(value, ast.Call) and root(value) in bound:
                yield node.lineno
        flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in flat:
            if isinstance(target, ast.Attribute | ast.Subscript) and (
                root(target) in bound or ast.unparse(target).startswith("sys.modules")
            ):
                yield node.lineno


@pytest.mark.parametrize(
    "program",
    [
        "import torch\ntorch.cuda.synchronize = None",
        "import torch.nn.functional as F\nvars(F)['linear'] = None",
        "import litellm\nlitellm.custom_provider_map += []",
        "from megatron.core.optimizer import distrib_optimizer as d\nkept, d.HAVE_TE = d.HAVE_TE, True",
        "import ray\nsetattr(ray, 'init', None)",
        "import sglang\nvars(sglang).update(x=1)",
        "import sys\nsys.modules['triton'] = None",
    ],
)
def test_a_change_to_a_library_is_seen(program: str) -> None:
    assert list(changes(ast.parse(program))) == [2]


def test_nothing_outside_of_patches_changes_a_library() -> None:
    # The sandbox runs programs, and the loader of extensions files of the user, as modules of their own.
    exempt = ("sandbox/sandboxed/", "config/extension.py")
    places = [f"{file}:{line}" for file, tree in sources() for line in changes(tree)]
    assert [place for place in places if not place.startswith(exempt)] == []


def test_private_names_of_libraries_are_in_the_register() -> None:
    """A name with an underscore that the package reads but never defines belongs to a library."""
    defined, read = set(dir(builtins)) | DOCUMENTED, {}
    for file, tree in sources():
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
    naming.add(PACKAGE / "config" / "schema.py")
    names = [
        f"{file}:{number}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.parent.name not in ("patches", "te_cpu") and file not in naming
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if re.search(r'"cuda|torch\.cuda\.', line)
    ]
    assert names == []
