"""The file of API keys and the command that looks after it."""

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import crossbatch
from serving.errors import AlreadyExists, BadArtifact, CrossbatchError, InvalidArgument, NotFound
from serving.rpc import keys
from serving.rpc.keys import add_key, read_keys, revoke_key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_the_file_holds_the_hash_of_a_key_for_its_owner_alone(file: Path) -> None:
    left = file.with_name("keys.json.tmp")
    left.write_text("of a process that was killed")
    left.chmod(0o666)
    key = add_key(file, "shop", "write")
    assert key.startswith("cb_")
    assert len(key) == 3 + 43  # 32 bytes in base64
    (kept,) = read_keys(file)
    assert (kept.name, kept.role, kept.revoked) == ("shop", "write", None)
    assert kept.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not left.exists()
    assert add_key(file, "other", "read") != key


def test_keys_added_at_once_are_all_kept_up_to_the_most(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add_key(file, f"k{i}", "read"), range(16)))
    assert {key.name for key in read_keys(file)} == {f"k{i}" for i in range(16)}
    monkeypatch.setattr(keys, "MAX_KEYS", 16)
    with pytest.raises(InvalidArgument, match="the most"):
        add_key(file, "b", "read")


def test_a_revoked_key_keeps_its_date_and_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(file, "shop", "read")
    monkeypatch.setattr(keys, "_now", lambda: "2026-01-01T00:00:00Z")
    assert revoke_key(file, "shop").revoked == "2026-01-01T00:00:00Z"
    monkeypatch.setattr(keys, "_now", lambda: "2027-01-01T00:00:00Z")
    assert revoke_key(file, "shop").revoked == "2026-01-01T00:00:00Z"
    with pytest.raises(AlreadyExists, match="revoked 2026"):
        add_key(file, "shop", "read")
    with pytest.raises(NotFound, match="'shup'"):
        revoke_key(file, "shup")


def test_a_link_to_the_file_stays_one(file: Path) -> None:
    real = file.with_name("real.json")
    add_key(real, "a", "read")
    file.symlink_to(real)
    add_key(file, "b", "read")
    assert file.is_symlink()
    assert [key.name for key in read_keys(real)] == ["a", "b"]


@pytest.mark.parametrize("name", ["", "a b", "-a", "x" * 65, "ä", "a\n", "../a"])
def test_a_name_that_would_not_be_told_apart_in_a_log_is_refused(file: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be a key's name"):
        add_key(file, name, "read")
    assert not file.exists()


KEY = {"name": "a", "role": "read", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z", "revoked": None}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "the whole is not"),
        ('{"format": 2}', "format 2 and this crossbatch reads format 1"),
        ('{"keys": []}', None),
        ({"format": 1, "keys": [KEY | {"role": "admin"}]}, "keys.0.role"),
        ({"format": 1, "keys": [KEY | {"sha256": "0" * 63}]}, "keys.0.sha256"),
        ({"format": 1, "keys": [KEY | {"more": 1}]}, "keys.0.more"),
        ({"format": 1, "keys": [KEY, KEY]}, "a name is in it twice"),
        ({"format": 1, "keys": [KEY, KEY | {"name": "b"}]}, "a sha256 is in it twice"),
        ("\xff\xfe", "it is no JSON"),
    ],
)
def test_a_file_that_is_damaged_or_of_a_newer_format_is_refused_and_left_as_it_is(
    file: Path, content: Any, told: str | None
) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_bytes(text.encode("latin-1"))
    if told is None:
        assert read_keys(file) == []
        return
    for use in (lambda: read_keys(file), lambda: add_key(file, "new", "read")):
        with pytest.raises(BadArtifact, match=told) as failure:
            use()
        assert str(file) in str(failure.value)
    assert file.read_bytes() == text.encode("latin-1")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CrossbatchError, match="cannot be written"):
        add_key(tmp_path / "nowhere" / "keys.json", "a", "read")
    with pytest.raises(BadArtifact, match="cannot be read"):
        read_keys(tmp_path)


def keys_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = crossbatch.main(["keys", *words])
    return status, *capsys.readouterr()


def test_the_command_adds_lists_and_revokes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--file", str(file))
    status, out, told = keys_command(capsys, "add", "shop", "--role", "write", *where)
    key = out.removesuffix("\n")  # nothing else, so that `> key` makes a file that can be used
    assert status == 0
    assert "the key of shop, of the role write; it is shown this once" in told
    assert key not in told
    assert read_keys(file)[0].sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert json.loads(keys_command(capsys, "add", "web", "--json", *where)[1])["name"] == "web"
    assert json.loads(keys_command(capsys, "revoke", "web", "--json", *where)[1])["role"] == "read"
    head, shop, web = keys_command(capsys, "list", *where)[1].splitlines()
    assert head.split() == ["name", "role", "created", "revoked"]
    assert shop.split()[::3] == ["shop", "-"]
    assert web.split()[3].endswith("Z")
    listed = keys_command(capsys, "list", "--json", *where)[1]
    assert [entry["name"] for entry in json.loads(listed)["keys"]] == ["shop", "web"]
    assert key not in listed
    assert "sha256" not in listed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["add"], "add needs one word"),
        (["revoke"], "revoke needs one word"),
        (["list", "shop"], "list needs no word"),
        (["list"], "there is no key file"),
        (["revoke", "shop"], "there is no key file"),
        (["add", "shop", "--role", "admin"], "--role"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_sentence(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    status, out, error = keys_command(capsys, *words, "--file", str(file))
    assert (status, out) == (2, "")
    assert told in error
    assert error.count("\n") == 1
    assert not list(file.parent.iterdir())
