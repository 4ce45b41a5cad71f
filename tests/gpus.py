"""Requirements of tests marked `gpu`, and the report of a session that runs them (`make test-gpu`)."""

from __future__ import annotations

import time
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest

from megatron_collab.runtime import device

VERSIONS = ("torch", "megatron-core", "transformer-engine", "sglang", "torch-memory-saver", "ray")
HOPPER = (9, 0)  # for FP8 in blocks, in the trainer and in the servers


def lacking(devices: int = 1, capability: tuple[int, int] = (0, 0), engine: bool = False, server: bool = False) -> str:
    """Why this machine cannot run a test with these requirements; '' if it can.

    `engine`: TransformerEngine; `server`: SGLang.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < devices:
        return f"needs {devices} GPU{'s' * (devices > 1)}, {count} here"
    if (has := device.capability() or (0, 0)) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}, {has[0]}.{has[1]} here"
    required = {"TransformerEngine": ("transformer_engine", engine), "SGLang": ("sglang", server)}
    probes = {name: device.probe(library) for name, (library, needed) in required.items() if needed}
    return next((f"needs {name}: {probe.detail}" for name, probe in probes.items() if not probe.available), "")


class Report:
    """A pytest plugin that writes every test's result, seconds and figures (record_property) as a page.

    The page is written after every test: a session that is killed leaves what it has.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.monotonic()
        self.summaries: dict[str, str] = {}  # by test: the first paragraph of its docstring
        self.results: dict[str, tuple[str, float, str]] = {}  # by test: result, seconds, figures or skip reason
        self.running = ""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        text = getattr(getattr(item, "obj", None), "__doc__", None) or ""
        self.summaries[item.nodeid] = " ".join(text.strip().split("\n\n")[0].split())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A session that is killed leaves the name of the test that ran."""
        self.running = nodeid
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down: their seconds are added, and the worst result counts."""
        result, seconds, before = self.results.get(report.nodeid, ("passed", 0.0, ""))
        why = (
            report.longrepr[2].removeprefix("Skipped: ")
            if report.skipped and isinstance(report.longrepr, tuple)
            else ""
        )
        if report.failed:
            why = " ".join(report.longreprtext.strip().splitlines()[-1:]).replace("|", "/")[:300]
        measured = [f"{name} {value}" for name, value in report.user_properties]
        figures = ", ".join(filter(None, [why, *measured])) or before
        outcome = result if report.passed else report.outcome
        self.results[report.nodeid] = (outcome, seconds + report.duration, figures)
        if report.when == "teardown":
            self.running = ""
            self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.page())

    def page(self) -> str:
        import torch

        count = {
            name: sum(result[0] == name for result in self.results.values()) for name in ("passed", "failed", "skipped")
        }
        total = ", ".join(f"{number} {name}" for name, number in count.items())
        rows = (
            " | ".join([f"| `{name}`", self.summaries.get(name, ""), result, f"{seconds:.1f}", f"{figures} |"])
            for name, (result, seconds, figures) in sorted(self.results.items())
        )
        return "\n".join(
            [
                f"# Tests on GPUs, {date.today().isoformat()}",
                "",
                f"- Device: {device.probe(device.GPU).detail}; CUDA {torch.version.cuda}",
                f"- {', '.join(map(_version, VERSIONS))}",
                f"- {total}, in {time.monotonic() - self.began:.0f} s",
                *([f"- Not ended: `{self.running}`"] if self.running else []),
                "",
                "| test | what it shows | result | seconds | measured |",
                "|---|---|---|---|---|",
                *rows,
                "",
            ]
        )


def _version(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"no {name}"
