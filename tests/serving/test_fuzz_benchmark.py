"""The benchmark that feeds the server with what is nearly right, in short, and the makers of its cases."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks import fuzz
from benchmarks.fuzzing import campaign as module
from benchmarks.fuzzing import mutation, pictures
from benchmarks.fuzzing.campaign import Campaign, Finding
from benchmarks.fuzzing.requests import methods, request
from protos import retrieval_service_pb2 as pb


def test_a_short_run_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--count 1900 --seed 7 --save {tmp_path / 'found'} --json {tmp_path / 'result.json'}"
    status = fuzz.main(words.split())
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["findings"] == []
    assert result["not_implemented"] == []
    assert "answers that no input deserves: 0: met" in shown
    assert result["cases"] >= 1900
    assert {"Search OK", "Search INVALID_ARGUMENT"} <= result["codes"].keys()
    assert result["codes"]["image OK"] > 100
    assert result["codes"]["image 3"] > 300
    assert not (tmp_path / "found").exists()
    assert status in (0, 1)  # the memory of a server that has just started still grows


def test_a_case_is_made_again_by_its_seed() -> None:
    seeds = pictures.seeds()
    first, again = ([mutation.image(Random(f"1:{i}"), seeds) for i in range(50)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 40
    search = next(method for method in methods() if method.path.endswith("RetrievalService/Search"))
    one, same = (request(Random(3), search, seeds, b"vector", "tiny") for _ in range(2))
    assert pb.SearchRequest.FromString(one) == pb.SearchRequest.FromString(same)


def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, replies: list[bytes]) -> Campaign:
    """Send a call with images and one with a message to a server that ends every call alike."""

    async def answered(*_: Any) -> tuple[str, str, list[bytes]]:
        return code, "why", replies

    monkeypatch.setattr(module, "call", answered)
    campaign, channel = Campaign(5, methods(), bytes(12), "tiny", tmp_path / "found"), MagicMock()
    asyncio.run(campaign.send(channel, [0, 1]))
    return campaign


def test_an_undeserved_answer_is_kept_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = sent(tmp_path, monkeypatch, "INTERNAL", [])
    assert campaign.cases == 65
    assert {finding.group for finding in campaign.findings} == {0, 1}
    first = next(finding for finding in campaign.findings if finding.group == 0)
    assert first == Finding(0, "/crossbatch.v1.RetrievalService/Embed", "INTERNAL", "why")
    kept = sorted((tmp_path / "found").iterdir())
    names = [path.name.rpartition("-")[0] for path in kept]
    assert names == ["seed5-group0", "seed5-group0", "seed5-group1", "seed5-group1"]
    assert len(pb.EmbedRequest.FromString(kept[0].read_bytes()).images) == 64
    refusals = sent(tmp_path, monkeypatch, "INVALID_ARGUMENT", [])
    assert refusals.findings == []
    assert refusals.codes["Embed INVALID_ARGUMENT"] >= 1


@pytest.mark.parametrize("fault", ["an image's own bug", "a result is missing", "a vector is cut off"])
def test_each_image_answers_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    reply = pb.EmbedResponse(results=[pb.EmbedResult(vector=bytes(12))] * 64)
    if fault == "an image's own bug":
        reply.results[3].error.code = 13
    elif fault == "a result is missing":
        del reply.results[63]
    else:
        reply.results[3].vector = bytes(8)
    campaign = sent(tmp_path, monkeypatch, "OK", [reply.SerializeToString()])
    found = [finding for finding in campaign.findings if finding.group == 0]
    assert len(found) == 1
