"""The cores that a process may use, not those that the machine has."""

import os
from pathlib import Path

import pytest

from serving.cores import usable_cores


def test_the_mask_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    monkeypatch.setattr("serving.cores._quotas", list)
    assert usable_cores() == 3


def test_without_masks_the_machines_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr("serving.cores._quotas", list)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("own", "limits", "cores"),
    [
        ("/", {"": "250000 100000"}, 2),  # docker run --cpus 2.5
        ("/", {"": "50000 100000"}, 1),
        ("/", {"": "max 100000"}, 8),
        ("/", {}, 8),
        ("/shop.slice/server", {"shop.slice": "300000 100000", "shop.slice/server": "max 100000"}, 3),
        ("/shop.slice/server", {"shop.slice": "600000 100000", "shop.slice/server": "400000 100000"}, 4),
        ("/", {"": "nonsense"}, 8),
        ("/", {"": "1600000 100000"}, 8),
    ],
)
def test_a_quota_of_time_counts_as_so_many_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, limits: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("serving.cores._SELF", tmp_path / "self")
    monkeypatch.setattr("serving.cores._GROUPS", tmp_path / "cgroup")
    (tmp_path / "self").write_text(f"1:cpu:/other\n0::{own}\n")
    for group, said in limits.items():
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / group / "cpu.max").write_text(f"{said}\n")
    assert usable_cores() == cores


def test_without_control_groups_the_mask_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("serving.cores._SELF", tmp_path / "none")
    assert usable_cores() == 2
