"""Transport through a Hugging Face folder in run.dir, which SGLang's own loader reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from megatron_collab.weight_sync.transports.base import FolderTransport


class DiskTransport(FolderTransport):
    """Saves into one folder, which exists only during a sync; it replaces the folder of a killed run."""

    def save(self) -> Path:
        self.save_hf(self.folder)
        return self.folder

    def clear(self, number: int) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder)
