"""Package metadata. Versions stand in requirements/ only; the extras read them from there."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

REQUIREMENTS = Path(__file__).parent / "requirements"

# What the package imports itself. SGLang is not among them on CPU: its own requirements name CUDA packages, so
# it comes from requirements/cpu.lock with --no-deps, as `make setup` does.
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
    "math-verify",
    "sacrebleu",
    "tiktoken",
    "aiohttp",
    "numpy",
    "Jinja2",
    "matplotlib",
    "tensorboard",
    "tqdm",
    "filelock",
]
DEV = ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy"]


def lines(name: str) -> list[str]:
    """The requirements in a file of requirements/, without comments."""
    text = (REQUIREMENTS / name).read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pinned(names: list[str], lock: str) -> list[str]:
    """`names` with the versions of a lock."""
    pins = {line.split("==")[0]: line for line in lines(lock)}
    return [pins[name] for name in names]


setup(
    name="megatron-collab",
    version="0.1.0",
    description="Multiturn-aware reinforcement learning with Megatron-Core and SGLang",
    license="Apache-2.0",
    python_requires="==3.11.*",
    packages=find_packages(include=["megatron_collab*"]),
    package_data={"megatron_collab": ["**/*.j2"]},
    extras_require={
        "cpu": pinned(CPU, "cpu.lock"),
        "gpu": lines("gpu.in"),  # resolved, never run: see requirements/gpu.in
        "dev": pinned(DEV, "dev.lock"),
        "bench": lines("bench.lock"),
    },
)
