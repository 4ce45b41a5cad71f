"""Where the shape of a model is written down: in its folder, or for a plan on paper in conf/shapes."""

from __future__ import annotations

from pathlib import Path

from megatron_collab.config import CONF, ConfigError


def described(folder: Path) -> Path:
    """The file that says what shape the model of `folder` has; ConfigError where there is none."""
    choices = [folder / "config.json", CONF / "shapes" / f"{folder.name}.json"]
    for file in choices:
        if file.is_file():
            return file
    raise ConfigError(
        f"model.path={folder}: neither {choices[0]} nor conf/shapes/{folder.name}.json is there; give the folder of a "
        "Hugging Face model, or write its config.json to conf/shapes"
    )
