"""A worker of Ray that fails; alone in its file, since Ray's process imports the file of an actor's class."""

from __future__ import annotations

from typing import Any

from megatron_collab.llm.limiter import BudgetSpent


class FailingWorker:
    """Stops the run or fails, itself or by a call to another worker."""

    async def act(self, how: str, other: Any = None) -> None:
        if other is not None:
            await other.act.remote(how)
        raise BudgetSpent("llm.budget_usd=1 is used up") if how == "stops" else ValueError("fails")
