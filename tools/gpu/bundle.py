"""Packs this checkout, and the packages that its tests for GPUs need, for a machine that has no network.

    .venv/bin/python tools/gpu/bundle.py FOLDER [--engine] [--dry]

FOLDER gets run.sh and the bundle `base`, with --engine also `engine`, as files of at most 60 MiB. Files that git does
not track are not packed, since they may hold keys; those that it does not ignore are listed. The other machine has
torch, triton and transformers, with what these need, and the same Python as this environment; nothing is installed
there (docs/howto/borrowed-gpu.md).

Packages that work with any torch are copied from this environment. Those for GPUs are wheels, which pip downloads into
FOLDER/wheels if they are not there yet. --dry leaves them out, since run.sh --dry does without them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60 << 20  # bytes of a file
PYTHON = "cp{}{}".format(*sys.version_info)
PACKAGES = {
    "base": """hydra-core omegaconf antlr4-python3-runtime megatron-core psutil scipy
        jsonschema jsonschema-specifications referencing rpds-py attrs zstandard
        aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl
        pytest pygments pluggy iniconfig pytest-timeout pytest-xdist execnet hypothesis sortedcontainers""",
    "engine": """einops protobuf
        pydantic pydantic-core annotated-types typing-inspection""",
}
WHEELS = {
    "base": "torch-memory-saver",  # for the stages facts and memory
    "engine": """transformer-engine transformer-engine-cu13 transformer-engine-torch
        onnx onnx-ir onnxscript ml-dtypes""",  # its import needs the last four
}

Entry = tuple[str, Path]  # the path in a bundle, and the file


def listed(*options: str) -> list[Path]:
    """The files of this checkout that `git ls-files` lists."""
    command = ["git", "ls-files", "-z", *options]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def checkout(folder: Path) -> list[Entry]:
    """The files that git tracks; prints those outside of `folder` that it neither tracks nor ignores."""
    tracked = listed()
    if any(path.is_relative_to(folder) for path in tracked):
        sys.exit(f"bundle.py: {folder} has files that git tracks; choose another FOLDER, such as build/borrowed")
    for path in listed("--others", "--exclude-standard"):
        if not path.is_relative_to(folder):
            print(f"left out, since git does not track it: {path.relative_to(ROOT)}")
    return [(f"checkout/{path.relative_to(ROOT)}", path) for path in tracked]


def installed(package: str) -> Iterator[Entry]:
    """The files of a package of this environment, without its programs, which are outside of the folder of packages."""
    for file in metadata.distribution(package).files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            yield f"packages/{file}", Path(str(file.locate()))


def unpacked(package: str, wheels: Path, folder: Path) -> Iterator[Entry]:
    """The files of a wheel in `wheels`, where pip puts it if it is not there; they are unpacked into `folder`."""
    locks = "".join((ROOT / f"requirements/{name}.lock").read_text() for name in ("base", "gpu"))
    requirement = next(line for line in locks.splitlines() if line.startswith(f"{package}=="))
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    if not any(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", wheels, requirement], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            sys.exit(f"bundle.py: {wheels} has no {pattern}, and pip found none: {reason}")
    with zipfile.ZipFile(next(wheels.glob(pattern))) as wheel:
        wheel.extractall(folder / package)
    for path in filter(Path.is_file, (folder / package).rglob("*")):
        yield f"packages/{path.relative_to(folder / package)}", path


def pack(name: str, entries: Iterable[Entry], folder: Path) -> None:
    """Write a bundle as files NAME.001of002, …; an older one is replaced when they are complete."""
    with TemporaryDirectory(dir=folder) as new:
        whole = Path(new, f"{name}-{PYTHON}.tar.gz")
        with tarfile.open(whole, "w:gz", compresslevel=6) as archive:
            for place, path in entries:
                archive.add(path, place, recursive=False)
        count = -(-whole.stat().st_size // LIMIT)
        parts = [whole.with_name(f"{whole.name}.{number:03}of{count:03}") for number in range(1, count + 1)]
        with whole.open("rb") as file:
            for part in parts:
                part.write_bytes(file.read(LIMIT))
        for old in folder.glob(f"{name}-*.tar.gz.*"):
            old.unlink()
        for part in parts:
            moved = part.rename(folder / part.name)
            print(f"{moved}: {moved.stat().st_size / 2**20:.1f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", action="store_true", help="also TransformerEngine, for the stage of that name")
    parser.add_argument("--dry", action="store_true", help="without the wheels for GPUs, for run.sh --dry")
    options = parser.parse_args()
    files = checkout(options.folder.resolve())
    wheels = options.folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    print(shutil.copy(ROOT / "tools/gpu/run.sh", options.folder))
    for bundle in ("base", "engine") if options.engine else ("base",):
        with TemporaryDirectory(dir=options.folder) as folder:
            entries = [entry for package in PACKAGES[bundle].split() for entry in installed(package)]
            if not options.dry:
                entries += [
                    entry for package in WHEELS[bundle].split() for entry in unpacked(package, wheels, Path(folder))
                ]
            pack(bundle, [*files, *entries] if bundle == "base" else entries, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
