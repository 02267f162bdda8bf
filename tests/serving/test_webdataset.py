"""Tars of samples: every kind of name, field and damage; what is read is what was put in, to the byte."""

import gzip
import io
import json
import pickle
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.catalog.catalog import Row, SplitRule, read, select
from serving.errors import BadData

Members = Mapping[str, bytes | str]
_FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}


def make_tar(path: Path, members: Members, form: Literal["gnu", "pax", "ustar"] = "gnu") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=_FORMATS[form], encoding="utf-8", errors="surrogateescape") as tar:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _bytes(rows: tuple[Row, ...]) -> dict[str, bytes]:
    return {row.key: row.image.read_bytes() for row in rows}


def test_samples_are_members_of_one_name_up_to_the_first_point(tmp_path: Path) -> None:
    make_tar(
        tmp_path / "shard-000.tar",
        {
            "birds/1.jpg": b"one",
            "birds/1.cls": "7\n",
            "birds/1.json": json.dumps({"price": 9.5, "label": "x", "tags": [1], "none": None, "new": True}),
            "birds/1.seg.png": b"no image of the sample",
            "birds.v2/2.JPG": b"two",
            "birds.v2/2.txt": " wren \n",
            "3.json": '{"class": 12, "size": 1234567890123456}',
            "3.webp": b"three",
            "3.txt": "a caption",
            "4.label": "tern",
            "4.png": b"four",
            "4.txt": "another",
            "5.png": b"of no class",
            "IMG.2024.jpg": b"no image of the sample IMG",
            "only.txt": "no image",
            "._1.jpg": b"left by macOS",
            "__index__/1.jpg": b"of the shard itself",
            "readme": "no point",
        },
    )
    catalog = read(tmp_path)
    assert (catalog.format, catalog.table) == ("webdataset", None)
    assert {row.key: (row.label, row.metadata) for row in catalog.rows} == {
        "birds/1": ("7", {"price": 9.5, "label": "x", "new": True}),
        "birds.v2/2": ("wren", {}),
        "3": ("12", {"size": "1234567890123456", "txt": "a caption"}),
        "4": ("tern", {"txt": "another"}),
        "5": ("", {}),
    }
    assert _bytes(catalog.rows)["birds/1"] == b"one"
    assert catalog.path_of(catalog.rows[-1]) == "shard-000.tar/birds/1.jpg"
    assert catalog.unlabelled == 1
    assert catalog.passed_over == {".png": 1, ".jpg": 1}
    (note,) = catalog.notes
    assert "without an image were left out: 2, the first that of " in note
    assert "shard-000.tar/IMG.2024.jpg; a name is the sample's up to its first point" in note
    assert pickle.loads(pickle.dumps(catalog.rows)) == catalog.rows


def test_the_split_is_that_of_the_folder_or_of_the_beginning_of_the_name(tmp_path: Path) -> None:
    names = ["train-000.tar", "test/a.tar", "val_0.tar", "data/query/deep/b.tar", "trainer.tar"]
    names += ["GALLERY1.tar"]
    for number, name in enumerate(names):
        make_tar(tmp_path / name, {f"{number}.jpg": b"x", f"{number}.cls": str(number)})
    catalog = read(tmp_path)
    assert [row.split for row in catalog.rows] == ["train", "test", "", "query", "", "gallery"]
    assert [row.key for row in select(catalog, "test", SplitRule(by="given"))] == ["1", "3", "5"]


_PLAIN = st.characters(exclude_characters="/.\0", exclude_categories=["Cs", "Cc"])
_LONG = st.text("ab/é", min_size=90, max_size=300).map(lambda text: "/".join(filter(None, text.split("/"))))
_NAMES = st.text(_PLAIN, min_size=1, max_size=60) | _LONG


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(_NAMES, st.binary(max_size=1500), min_size=1, max_size=6), st.sampled_from(["gnu", "pax"])
)
def test_members_give_their_bytes_back(
    tmp_path: Path, samples: dict[str, bytes], form: Literal["gnu", "pax"]
) -> None:
    samples = {name: data for name, data in samples.items() if name and not name.startswith("__")}
    if not samples:
        return
    path = make_tar(tmp_path / "a.tar", {f"{name}.jpg": data for name, data in samples.items()}, form)
    catalog = read(path)
    assert _bytes(catalog.rows) == samples
    assert [row.key for row in catalog.rows] == sorted(samples)
    assert {catalog.path_of(row) for row in catalog.rows} == {f"a.tar/{name}.jpg" for name in samples}


def test_links_are_never_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    with tarfile.open(path, "w") as tar:
        links = {"1.jpg": tarfile.SYMTYPE, "2.jpg": tarfile.LNKTYPE, "3.cls": tarfile.SYMTYPE}
        for name, kind in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(tmp_path / "secret.jpg")
            tar.addfile(info)
        folder = tarfile.TarInfo("4.jpg")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        info = tarfile.TarInfo("3.jpg")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    catalog = read(path)
    assert [row.key for row in catalog.rows] == ["3"]
    assert catalog.rows[0].label == ""
    assert catalog.missing == ("a.tar/1.jpg", "a.tar/2.jpg")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.cls": "0", "1.txt": "x"}, r"hold no image: their members end in \.cls, \.txt, none in \.jpg"),
        ({}, "hold no image: their members end in nothing"),
        ({"1.jpg": "x", "1.png": "y"}, r"a\.tar/1\.png and .*a\.tar/1\.jpg are of one sample"),
        ({"1.jpg": "x", "1.cls": "cat"}, r"has the \.cls 'cat'; give a whole number"),
        ({"1.jpg": "x", "1.json": "{"}, r"\.json of .*1\.jpg is not JSON"),
        ({"1.jpg": "x", "1.json": "[1]"}, r"holds \[1\]; give an object"),
        ({"1.jpg": "x", "1.json": '{"label": [1]}'}, r"has the label \[1\]; give a text or a whole number"),
        ({"1.jpg": "x", "1.txt": b"\xff"}, r"1\.txt is not UTF-8 text at byte 0"),
        ({"1.jpg": "x", "1.txt": b"a" * (1 << 20) + b"b"}, r"has 1048577 bytes; the limit .* is 1048576"),
        ({"../1.jpg": "x"}, "the member '../1.jpg' of .* is no plain path"),
        ({"/etc/1.jpg": "x"}, "the member '/etc/1.jpg' of .* is no plain path"),
    ],
)
def test_what_does_not_hold_is_refused_by_name(tmp_path: Path, members: Members, message: str) -> None:
    with pytest.raises(BadData, match=message):
        read(make_tar(tmp_path / "a.tar", members))


def test_compressed_tars_are_refused_whatever_their_name(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "a.tar", {"1.jpg": b"x"}).read_bytes()
    for name in ("a.tar", "b.tar.gz", "c.TGZ"):
        (tmp_path / name).write_bytes(gzip.compress(whole))
        with pytest.raises(BadData, match=rf"{name} cannot be read: .* or compressed \(decompress it"):
            read(tmp_path / name)
    with pytest.raises(BadData, match="or compressed"):
        read(tmp_path)


def test_a_tar_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"1.jpg": b"x" * 700, "2.jpg": b"y" * 10})
    whole = path.read_bytes()
    for length in (0, 1, 511, 512, 513, 1024, 1535, 1536, 1537, 2048, 2559):
        path.write_bytes(whole[:length])
        with pytest.raises(BadData, match=r"a\.tar cannot be read: .*; it is damaged or cut off"):
            read(path)
    path.write_bytes(whole[:2560] + b"\0" * 512)
    assert len(read(path).rows) == 2
    for behind in (whole, b"x"):
        path.write_bytes(whole + behind)
        with pytest.raises(BadData, match="neither a header nor the end mark at byte 2560"):
            read(path)


def resize(data: bytearray, at: int, size: bytes) -> None:
    """Change the size that a header tells, and its checksum."""
    data[at + 124 : at + 136] = size
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def test_no_damage_gives_anything_but_rows_or_a_plain_error(tmp_path: Path) -> None:
    name = "n" * 120
    members: Members = {f"{name}.jpg": b"x" * 600, f"{name}.json": "{}", "2.jpg": b"y"}
    wholes = [make_tar(tmp_path / "a.tar", members, form).read_bytes() for form in ("gnu", "pax")]
    sizes = (b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0")
    chance, told = random.Random(0), list[str]()
    for number in range(200):
        data = bytearray(wholes[number % 2][:6144])
        for _ in range(chance.randint(1, 6)):
            byte = chance.choice((0, 32, 48, 55, 128, 255, chance.randrange(256)))
            data[chance.randrange(len(data))] = byte
        if number % 4 == 0:  # a header that holds for its checksum, with any size
            resize(data, chance.choice((0, 512)), chance.choice(sizes))
        (tmp_path / "a.tar").write_bytes(data)
        try:
            _bytes(read(tmp_path).rows)
        except BadData as error:
            told.append(str(error))
    assert 100 < len(told) < 200
    assert "\n" not in "".join(told)


def test_a_size_below_nothing_does_not_go_round_in_circles(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"1.jpg": b"x", "2.jpg": b"y"})
    data = bytearray(path.read_bytes())
    resize(data, 1024, (-1024).to_bytes(12, "big", signed=True))  # back to the first member
    path.write_bytes(data)
    with pytest.raises(BadData, match="the size of a member is below 0"):
        read(path)
