"""A set judged by hand: how it is read, and the figures of it against loops over its pairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import crossbatch
from serving.catalog.catalog import Row
from serving.catalog.picture import File
from serving.errors import BadData
from tests import oracles
from tests.training.small import TINY, Train
from training.evaluation import evaluate
from training.evaluation.marks import Mark, bootstrap, find_pairs, marked_metrics, read_marks

HEADER = "query,result,relevant\n"


def loops(embeddings: np.ndarray, pairs: dict[tuple[int, int], bool]) -> tuple[list[float], list[float]]:
    """Precision@1 and induced average precision of each query, by counting."""
    firsts, averages = [], []
    for query in sorted({query for query, _ in pairs}):
        results = [result for asked, result in sorted(pairs) if asked == query]
        results.sort(key=lambda result: -oracles.cosine(embeddings[query], embeddings[result]))
        firsts.append(float(pairs[query, results[0]]))
        total = relevant = 0.0
        for rank, result in enumerate(results, start=1):
            if pairs[query, result]:
                relevant += 1
                total += relevant / rank
        if relevant:
            averages.append(total / relevant)
    return firsts, averages


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]),
        st.booleans(),
        min_size=1,
    ),
    st.integers(0, 99),
)
def test_figures_by_counting(pairs: dict[tuple[int, int], bool], seed: int) -> None:
    embeddings = np.random.default_rng(seed).normal(size=(10, 4)).astype(np.float32) * 7
    found = marked_metrics(embeddings, pairs)
    firsts, averages = loops(embeddings, pairs)
    assert (found["queries"], found["pairs"], found["relevant"]) == (
        len(firsts),
        len(pairs),
        sum(pairs.values()),
    )
    assert found["precision_at_1"] == pytest.approx(np.mean(firsts))
    assert found["asked"] == len(averages)
    if averages:
        assert found["average_precision"] == pytest.approx(np.mean(averages))
    else:
        assert found["average_precision"] is None
    both = [{pairs[pair] for pair in pairs if pair[0] == query} for query in {pair[0] for pair in pairs}]
    assert found["decided"] == sum(len(each) == 2 for each in both)


def test_a_name_holds_any_character_within_its_line(tmp_path: Path) -> None:
    """Those that Python takes for ends of lines, and CSV does not."""
    name = "a\x0b\x1c\x85\u2028b"
    (tmp_path / "marks.csv").write_text(f"{HEADER}{name},c,1\nd,{name},0\n", encoding="utf-8")
    assert read_marks(tmp_path / "marks.csv") == [Mark(name, "c", True), Mark("d", name, False)]


def test_a_published_example_and_equal_results() -> None:
    """Right at ranks 1, 3 and 4 of what was judged: (1 + 2/3 + 3/4) / 3, whatever lies between unjudged."""
    angles = np.array([0, 0.1, 0.15, 0.2, 0.25, 0.3])
    embeddings = np.stack((np.cos(angles), np.sin(angles)), axis=1)
    found = marked_metrics(embeddings, {(0, 1): True, (0, 3): False, (0, 4): True, (0, 5): True})
    assert found["average_precision"] == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert found["average_precision_interval"] is None  # of one query
    alike = np.ones((4, 3), np.float32)
    for right, expected in ((1, 1.0), (2, 1 / 2), (3, 1 / 3)):  # equals rank by their row
        pairs = {(0, result): result == right for result in (3, 2, 1)}
        assert marked_metrics(alike, pairs)["average_precision"] == pytest.approx(expected)


def test_the_interval_of_a_mean() -> None:
    values = np.random.default_rng(5).random(400).tolist()
    found = bootstrap(values)
    assert found is not None
    half = 1.96 * np.std(values, ddof=1) / 20  # by the normal distribution, which 400 values come near to
    assert found == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.1 * half)
    assert found == bootstrap(values)
    assert bootstrap([0.5, 0.5]) == (0.5, 0.5)
    assert bootstrap([0.5]) is None


def test_files_are_read_and_may_be_joined(tmp_path: Path) -> None:
    file = tmp_path / "marks.csv"
    some = f'\ufeff{HEADER}"a,""b""",c,1\r\n\n'.encode()
    file.write_bytes(some + some.replace(b"1\r", b"0\r"))
    assert read_marks(file) == [Mark('a,"b"', "c", True), Mark('a,"b"', "c", False)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no mark"),
        (HEADER, "holds no mark"),
        ("query,result\na,b\n", "line 1 of .* must be query,result,relevant, and is 'query,result'"),
        (f"{HEADER}a,b,1\na,b\n", "line 3 of .*'a,b'"),
        (f"{HEADER}a,b,1,2\n", "line 2 of"),
        (f"{HEADER}a,b,yes\n", "line 2 of .* 1 \\(right\\) or 0"),
        (f"{HEADER},b,1\n", "line 2 of"),
        (f"{HEADER}a,,1\n", "line 2 of"),
        (f'{HEADER}"a,b,1\n', "line 2 of .* is no CSV"),
        (HEADER.encode() + b"\xff,b,1\n", "not UTF-8 text at byte 22"),
        (HEADER.encode("utf-16"), "not UTF-8 text at byte 0"),
    ],
)
def test_what_is_no_mark_is_told_by_its_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    file = tmp_path / "marks.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadData, match=says):
        read_marks(file)
    with pytest.raises(BadData, match="cannot be read"):
        read_marks(tmp_path)


def test_names_are_found_among_the_rows() -> None:
    keys = ["x/1.jpg", "y/1.jpg", "y/2.jpg", "2.jpg", "id 7"]
    rows = [
        Row(key, File(Path("/data") / (f"{place}.png" if key == "id 7" else key)), "")
        for place, key in enumerate(keys)
    ]
    marks = [
        Mark("x/1.jpg", "y/1.jpg", True), Mark("x/1.jpg", "y/1.jpg", False),  # the last counts
        Mark("1.jpg", "2.jpg", True),  # of two rows
        Mark("2.jpg", "id 7", True),  # a key goes before a file's name
        Mark("4.png", "4.png", True),  # a result is a key
        Mark("4.png", "x/1.jpg", True),  # the file of a row whose key is another
        Mark("id 7", "id 7", True),
    ]  # fmt: skip
    pairs, unknown, itself = find_pairs(marks, rows)
    assert pairs == {(0, 1): False, (3, 4): True, (4, 0): True}
    assert (unknown, itself) == (["1.jpg", "4.png"], 1)


@pytest.fixture(scope="module")
def run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    train(out, *TINY)
    return out


def test_a_run_is_measured_by_marks(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "marks.csv"
    lines = [
        f"class0{c}/0.png,class0{other}/{i}.png,{int(c == other)}"
        for c in (0, 5)
        for other in (0, 5)
        for i in (1, 2)
    ]
    lines += ["class03/1.png,class03/2.png,1", "class03/1.png,gone.png,0", "class04/1.png,class04/1.png,1"]
    file.write_text(HEADER + "\n".join(lines))
    assert crossbatch.main(["evaluate", str(run), "--marks", str(file), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    counts = {"queries": 3, "pairs": 9, "relevant": 5, "decided": 2, "asked": 3, "itself": 1, "trained": 3}
    assert {name: found[name] for name in counts} == counts
    assert found["unknown"] == ["gone.png"]
    assert found["unreadable"] == []
    assert 0 <= found["untrained"]["average_precision"] <= 1
    told = evaluate.render(found)
    for words in (
        "9 judged pairs of 3 queries, 5 right", "precision@1", "induced AP", "95 % interval", "untrained",
        "1 queries have only right or only wrong", "1 names that the data set does not have, whose marks do"
        " not count: 'gone.png'", "marks of an image and itself", "images of classes that trained",
    ):  # fmt: skip
        assert words in told
    embeddings = measured(run, data)
    keys = [row.key for row in embeddings[0]]
    pairs = {
        (keys.index(q), keys.index(r)): mark == "1" for q, r, mark in (line.split(",") for line in lines[:9])
    }
    firsts, averages = loops(embeddings[1], pairs)
    assert found["precision_at_1"] == pytest.approx(np.mean(firsts))
    assert found["average_precision"] == pytest.approx(np.mean(averages))


def measured(run: Path, data: Path) -> tuple[tuple[Row, ...], np.ndarray]:
    from serving.catalog.catalog import read
    from training.loop.run import load_run
    from training.report.findings import embed_split

    loaded, rows = load_run(run), read(data).rows
    return rows, embed_split(rows, loaded.embedder, loaded.recipe, batch=64, split="all").embeddings


def test_marks_of_nothing_and_other_measures_are_refused(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "marks.csv"
    file.write_text(f"{HEADER}a,b,1\n")
    with pytest.raises(BadData, match=r"judges no two images .* \(it has no 'a'\)"):
        evaluate.run(evaluate.Settings(target=run, marks=file))
    with pytest.raises(ValidationError, match="leave --clusters, --exclude-same out"):
        evaluate.Settings(target=run, marks=file, clusters=True, exclude_same="a")
