"""Services without methods that are registered one by one."""

import asyncio
from typing import Any

import pytest

from tests.serving.stubs import Stubs


def test_a_call_waits_for_no_task_of_another_method(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 28 methods that are registered, gRPC would wait for as many tasks at each call."""
    waited: list[int] = []
    wait = asyncio.wait

    async def counted(tasks: Any, **how: Any) -> object:
        waited.append(len(tasks))
        return await wait(tasks, **how)

    monkeypatch.setattr(asyncio, "wait", counted)
    for number in range(3):
        stubs.embed(f"{number}".encode())
    assert max(waited, default=1) <= 2
