"""MLflow: one run for all starts; the file `mlflow_id` has its id."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_collab.observability.writers import Rows, Writer, plain_text
from megatron_collab.runtime import files
from megatron_collab.settings import RunConfig, option
from megatron_collab.settings.values import leaves

_PARAMS = 100  # that one request may hold
_PARAM_LENGTH = 500


class MlflowWriter(Writer):
    package, install = "mlflow", "mlflow-skinny"
    key_names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")

    @dataclass(frozen=True)
    class Options:
        uri: str | None = option(None, "tracking server or store; null: MLFLOW_TRACKING_URI")
        experiment: str = option("megatron-collab", "name of the experiment, created if it does not exist")

    def __init__(self, options: Any, run: RunConfig, settings: Mapping[str, Any], start: int) -> None:
        super().__init__(options, run, settings, start)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(options.uri), Metric
        folder = Path(run.dir)
        file = folder / "mlflow_id"
        if file.exists():
            self._id = file.read_text()
            self._client.set_terminated(self._id, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(options.experiment)
        of = experiment.experiment_id if experiment else self._client.create_experiment(options.experiment)
        self._id = self._client.create_run(of, run_name=folder.name).info.run_id
        files.replace(file, self._id)
        values = leaves(settings)
        params = [Param(_name(name), str(value)[:_PARAM_LENGTH]) for name, value in values]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(_name(name), v, now, step) for name, v in metrics.items()])

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        text = "\n\n---\n\n".join(map(plain_text, rows))
        self._client.log_text(self._id, text, f"{_name(name)}/conversations_{step}.txt")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _name(name: str) -> str:
    """A name of the characters that MLflow takes; pass@k and pass^k stay two names."""
    return re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_").replace("^", "_hat_"))
