"""The layout of the package: one-way layers, no import cycles, no hidden imports, unambiguous names, whole objects."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import repeat
from pathlib import Path

import grimp
import pytest

from tests.attributes import incomplete

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_collab"

# Modules with an import of the package within a function, and why it cannot be at the top.
# None of these hides a cycle: the test on cycles follows them too.
LAZY = {
    "commands.__main__": "--help and --version answer before Hydra is imported",
    "commands.convert": "answers --help and wrong arguments before torch is imported",
    "commands.doctor": "lists what is missing on a machine without torch",
    "commands.plan_sync": "answers --help and wrong arguments before torch is imported",
    "commands.prepare_data": "answers --help and wrong arguments before transformers is imported",
    "commands.recording": "answers --help and wrong arguments before numpy is imported",
    "commands.score": "answers --help and wrong arguments before Ray and the libraries of data are imported",
    "launch.extensions": "as reward.workers, in the child that tries a metric's constructor",
    "launch.slurm": "its commands address and wait, which every node runs, need no torch",
    "evaluate": "as train",
    "train": "refuses bad input and becomes torchrun before torch, Megatron and Ray are imported",
    "launch.evaluation": "as launch.tasks; only a checkpoint needs torch, to be converted",
    "launch.tasks": "datasets and transformers take seconds, and bad settings are refused without them",
    "trainer.megatron.config": "the attention of TransformerEngine's layers can be imported only where it is",
    "environments.desk": "as booking",
    "environments.booking": "the script and the metrics of the world need neither torch nor a tokenizer",
    "inference.cpu.serve": "the attention of CPU servers is imported in the process that computes",
    "observability.folder": "what draws the report takes a second to import, and the run is over by then",
    "patches.sglang": "stands in for sgl_kernel only where that is missing",
    "rehearsal.command": "answers --help and wrong arguments before torch is imported",
    "reward.workers": "LiteLLM takes seconds to import, and most metrics need none",
    "weight_sync.receiver": "servers import Hydra only for a transport in a file of the user",
    "rollout.workers": "the actors import what they need; the process that starts them does not",
    "synthesis.build_dataset": "as train",
    "talk.chat": "answers --help and wrong arguments before Ray and the libraries of data are imported",
    "talk.speaker": "the page's server holds an end of its pipe, without Ray and the libraries of data",
    "user_logs.command": "answers --help and wrong arguments before LiteLLM and Presidio are imported",
}

# Functions that read settings, and the modules that call each: one makes the frozen value, which all others take.
# The reasons are those of the further modules.
READS_SETTINGS = {
    "run_spec": {
        "launch.validate": "",
        "launch.prepare": "names of the Hub are pinned after the checks",
    },
    "evaluation_spec": {
        "launch.spec": "a build of a data set is an evaluation",
        "talk.settings": "a chat is played as in an evaluation",
    },
    "data_spec": {"launch.spec": "", "launch.data_specs": "the data of a run that is recorded"},
    "evaluation_data": {
        "launch.spec": "",
        "launch.data_specs": "as for data_spec",
        "launch.evaluation": "budgets depend on the sets, and an earlier start may have had other sets",
        "synthesis.settings": "as launch.evaluation",
        "commands.doctor": "a model without a run",
    },
    "sources": {
        "launch.data_specs": "",
        "data.evaluation": "the sources of data.eval are sets",
        "data.sources": "a source on a command line",
    },
    "evaluation_sets": {"launch.data_specs": ""},
    "prompt_spec": {"launch.data_specs": "", "launch.play_specs": ""},
    "play_spec": {"launch.spec": ""},
    "evaluation_play": {"launch.spec": ""},
    "reward_spec": {
        "launch.play_specs": "",
        "launch.server_specs": "models that metrics have the run serve; servers are checked by themselves too",
        "commands.score": "compares rewards with that of the run",
    },
    "reward_function": {"reward.spec": ""},
    "judge_endpoints": {"launch.spec": "", "commands.score": "as for reward_spec"},
    "user_endpoints": {"launch.spec": ""},
    "assistant_endpoints": {"launch.spec": "", "launch.evaluation": "budgets depend on the assistant"},
    "user_directory": {"launch.play_specs": ""},
    "tool_spec": {"launch.play_specs": ""},
    "trainer_spec": {"train": "", "rehearsal.rank": "rehearses the training"},
}

# Attributes that some instance lacks once it is constructed, and why.
LATER = {
    "inference.cpu.adapters.ExactLoRABackend.batch_info": "SGLang prepares each batch before its first product",
    "inference.cpu.adapters.ExactLoRABackend.slot": "as batch_info",
    "trainer.megatron.model.PolicyModel.rotary_pos_emb": "Megatron's, which reads it if it fuses the rotation",
}


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """The modules by their names within the package, parsed once for the tests of this file."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = (".".join(file.relative_to(ROOT / PACKAGE).with_suffix("").parts) for file in files)
    return [
        (name.removesuffix(".__init__"), ast.parse(file.read_text())) for name, file in zip(names, files, strict=True)
    ]


@pytest.fixture(scope="module", autouse=True)
def parsed_trees() -> Iterator[None]:
    """They take 77 MB, which the tests of other files need not hold."""
    yield
    modules.cache_clear()


@pytest.mark.processes
def test_packages_import_only_packages_below_them() -> None:
    """The contracts of pyproject.toml, as `make lint` runs them."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.seconds
def test_the_core_names_satellites_only_in_the_table_of_commands() -> None:
    """As text, by which a module can be imported or run; the contract has the imports."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    satellites = [name for layer in contracts[0]["layers"][:2] for name in layer.split(" | ")]
    path = re.compile(rf"{PACKAGE}\.({'|'.join(satellites)})\b")
    naming = {
        name
        for name, tree in modules()
        if name.partition(".")[0] not in satellites
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.search(node.value)
    }
    assert naming == {"commands.__main__"}


def test_no_module_imports_itself_through_others() -> None:
    """Neither within a package nor through its __init__, which the contract on siblings does not cover."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    circles = [
        f"{module} -> {imported}"
        for module in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(module))
        if graph.chain_exists(importer=imported, imported=module)
    ]
    assert not circles, "\n".join(circles)


@pytest.mark.seconds
def test_imports_of_the_package_are_at_the_top() -> None:
    lazy_imports: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in (node for function in functions for node in ast.walk(function)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                lazy_imports[name].add(str(node.module))
            if isinstance(node, ast.Import):
                lazy_imports[name] |= {alias.name for alias in node.names if alias.name.startswith(PACKAGE)}
    hidden = [f"{name}: {', '.join(sorted(lazy))}" for name, lazy in lazy_imports.items() if lazy and name not in LAZY]
    assert not hidden, "\n".join(hidden)
    assert all(lazy_imports[name] for name in LAZY), "an exception that is no longer needed"


@pytest.mark.seconds
def test_settings_are_read_once() -> None:
    callers: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules():
        for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = call.attr if isinstance(call, ast.Attribute) else call.id if isinstance(call, ast.Name) else ""
            if function in READS_SETTINGS:
                callers[function].add(name)
    assert callers == {function: set(reasons) for function, reasons in READS_SETTINGS.items()}


CHANGING = {
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "append",
    "extend",
    "insert",
    "remove",
    "sort",
    "reverse",
}


def written_settings(tree: ast.Module) -> Iterator[str]:
    """What a module assigns within settings.

    These are names annotated or made as a class `…Config`, `config`, and the names that parts of them get.
    """
    kind = re.compile(r"\b\w*Config\b")
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        arguments = function.args
        bounds = {part.name: ast.unparse(part.bound) for part in function.type_params if getattr(part, "bound", None)}
        names = {"config"}
        for part in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            annotation = ast.unparse(part.annotation) if part.annotation else ""
            names |= {part.arg} if kind.search(bounds.get(annotation, annotation)) else set()
        for target, value in assignments(function):
            if isinstance(target, ast.Attribute | ast.Subscript) and base(target) in names:
                yield ast.unparse(target)
            constructed = isinstance(value, ast.Call) and kind.fullmatch(ast.unparse(value.func))
            part = isinstance(value, ast.Attribute | ast.Subscript) and base(value) in names
            if isinstance(target, ast.Name) and (constructed or part):
                names.add(target.id)
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            changes = isinstance(call.func, ast.Attribute) and call.func.attr in CHANGING and base(call.func) in names
            if changes or (ast.unparse(call.func) == "setattr" and base(call.args[0]) in names):
                yield ast.unparse(call)


def assignments(function: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each assignment; of tuples, by entry."""
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign):
            yield node.target, node.value
        for target in node.targets if isinstance(node, ast.Assign) else ():
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            same = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(targets)
            yield from zip(targets, node.value.elts if same else repeat(node.value), strict=False)


def base(node: ast.expr) -> str:
    """The name that a chain of attributes and entries begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.seconds
def test_nothing_writes_into_settings() -> None:
    """What differs from composed settings is another instance (settings/values.py, `replaced`)."""
    writes = {f"{name}: {text}" for name, tree in modules() for text in written_settings(tree)}
    assert not writes, "\n".join(sorted(writes))


def test_a_write_into_settings_is_seen_under_any_name() -> None:
    source = """
def change[Program: PlayConfig](config: Program, other: schema.LlmConfig, text: str):
    data, fresh = config.data, Config()
    data.eval = other.cache = fresh.model.path = ""
    other.prices["m"] += [1]
    setattr(config.run, "dir", text)
    text.attribute = 1
"""
    writes = {"data.eval", "other.cache", "fresh.model.path", "other.prices['m']", "setattr(config.run, 'dir', text)"}
    assert {*written_settings(ast.parse(source))} == writes


def test_public_class_names_are_unique() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(name)
    shared = [f"{name}: {', '.join(where)}" for name, where in owners.items() if len(where) > 1]
    assert not shared, "\n".join(shared)


def test_a_public_function_names_what_it_checks_plans_or_finds() -> None:
    bare = [
        f"{name}.{node.name}"
        for name, tree in modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in ("check", "plan", "find")
    ]
    assert not bare, "\n".join(bare)


@pytest.mark.seconds
def test_every_attribute_exists_once_an_object_is_constructed() -> None:
    """On every rank, whatever is called later."""
    classes = {node.name: node for _, tree in modules() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    missing = {f"{name}.{attribute}" for name, tree in modules() for attribute in incomplete(tree, classes)}
    assert missing == set(LATER)


def test_branches_annotations_and_later_calls_do_not_complete_an_object() -> None:
    source = """
class Base:
    kind = "base"
    def __init__(self, rank):
        self.rank: int = rank
        if rank:
            self.either = 1
        else:
            self.either = 2
        if rank == 0:
            self.leader = True
        self.annotated: int

class Derived(Base):
    bare: int
    def begin(self):
        self.kind, self.rank, self.either = "x", 0, 0
        self.leader = self.annotated = self.bare = self.later = 0
        with self.lock as self.entered:
            pass
"""
    tree = ast.parse(source)
    later = ("annotated", "bare", "entered", "later", "leader")
    assert list(incomplete(tree, {})) == ["Base.annotated", "Base.leader", *(f"Derived.{name}" for name in later)]
