"""Package metadata. Pinned versions are in requirements/ only, the package's own is in megatron_collab/__init__.py."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
REQUIREMENTS = ROOT / "requirements"
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_collab" / "__init__.py").read_text())
assert VERSION

# What the package imports itself. SGLang is not among them on CPU: its own requirements name CUDA packages, so
# it comes from requirements/base.lock with --no-deps, as `make setup` does.
CPU = [
    "torch",
    "megatron-core",
    "psutil",
    "transformers",
    "safetensors",
    "ray",
    "litellm",
    "hydra-core",
    "omegaconf",
    "datasets",
    "pyarrow",
    "huggingface_hub",
    "httpx",
    "PyYAML",
    "math-verify",
    "sacrebleu",
    "tiktoken",
    "aiohttp",
    "jsonschema",
    "mcp",
    "httpx2",
    "numpy",
    "scipy",
    "Jinja2",
    "matplotlib",
    "tensorboard",
    "rich",
    "filelock",
    "packaging",
    "zstandard",
    "starlette",
    "uvicorn",
]
LOGS = ["presidio-analyzer", "scikit-learn", "datasketch"]  # for users-from-logs alone; Presidio brings spaCy
DEV = ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "import-linter", "playwright", "axe-playwright-python"]


def lines(name: str) -> list[str]:
    """The requirements in a file of requirements/, without comments."""
    text = (REQUIREMENTS / name).read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pinned(names: list[str], lock: str) -> list[str]:
    """`names` with the versions of a lock, which has normalized names."""
    pins = {line.split("==")[0]: line for line in lines(lock)}
    return [pins[name.lower().replace("_", "-")] for name in names]


class BuildWithConf(build_py):
    """conf/ is at the top of the repository, and in a wheel it is megatron_collab/conf."""

    def run(self) -> None:
        package = Path(self.build_lib) / "megatron_collab"
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)  # an earlier build's modules would go into this wheel
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "conf", package / "conf")


setup(
    name="megatron-collab",
    version=VERSION[1],
    description="Multiturn-aware reinforcement learning with Megatron-Core and SGLang",
    license="Apache-2.0",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["megatron_collab*"]),
    package_data={"megatron_collab": ["**/*.j2", "**/*.yaml", "view/static/*", "py.typed"]},
    cmdclass={"build_py": BuildWithConf},
    entry_points={"console_scripts": ["megatron-collab = megatron_collab.commands.__main__:main"]},
    extras_require={
        "cpu": pinned(CPU, "base.lock"),
        "gpu": lines("packages.in"),
        "logs": pinned(LOGS, "base.lock"),
        "dev": pinned(DEV, "dev.lock"),
        "bench": lines("bench.lock"),
    },
)
