"""Settings of servers, publishing and staleness that cannot work together."""

from __future__ import annotations

import pytest

from tests.helpers import refused


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        (["rollout.max_staleness=-1"], "must be at least 0"),
        (["rollout.max_staleness=1"], "set algo.correction=truncated"),
        (["rollout.server.ep=2"], "does not divide rollout.server.tp=1"),
        (["rollout.server.colocated=false", "parallel.offload=true"], "set parallel.offload=false"),
        (["publish.transport=pigeon"], "memory, network, disk"),
        (["publish.verify=-1"], "must be at least 0"),
    ],
)
def test_what_cannot_work_is_refused(settings: list[str], way_out: str) -> None:
    message = refused(*settings)
    assert any(setting.split("=")[0] in message for setting in settings)
    assert way_out in message
