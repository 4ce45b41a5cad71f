"""Free ports are below the kernel's own, and servers of one machine draw from different ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_collab.runtime import ports
from tests.helpers import free_port


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ports, "_KERNEL", tmp_path / "range")
    return tmp_path / "range"


def test_servers_of_a_machine_draw_from_different_ports(kernel: Path) -> None:
    kernel.write_text("20400\t60999\n")
    drawn = [{ports.bindable("port", 0, part=part, parts=3) for _ in range(40)} for part in range(3)]
    assert all(port % 3 == (20_000 + part) % 3 for part in range(3) for port in drawn[part])
    assert all(20_000 <= port < 20_400 for some in drawn for port in some)


def test_a_kernel_that_hands_out_all_of_them_is_named(kernel: Path) -> None:
    kernel.write_text("15000\t60999\n")
    with pytest.raises(ValueError, match=r"^rollout\.server\.port=0: the kernel hands out ports from 15000 on"):
        ports.bindable("rollout.server.port", 0)
    given = free_port()
    assert ports.bindable("rollout.server.port", given) == given
