"""`crossbatch evaluate`: retrieval metrics of a run or an ONNX model, on unseen classes by default."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from serving.catalog.catalog import Catalog, Format, Row, SplitRule, read, select
from serving.errors import BadData, BadSetting, CrossbatchError, NotFound
from training.data.partition import Exclude, Table, is_own, labelled, read_own
from training.data.pictures import Decoder, Embed, Stream, class_numbers, embed_pictures, tell_unreadable
from training.evaluation import marks, metrics

__all__ = ["NEAR", "Settings", "find_duplicates", "render", "run"]

NEAR = 0.92
"""Least cosine of a near-duplicate, by pooled features of EfficientNet-Lite0 (ImageNet weights, 224 px).

Of 100 classes of CUB-200-2011 all 13 pairs above it are one photograph twice or two of one moment; below 0.91
most are birds alike in one pose. Strokes on white (Omniglot) are above it without being copies.
"""
_TOLD = 20
"""Most pairs of near-duplicates that are named."""
_Featured = tuple[Sequence[Row], NDArray[np.float32]]
"""Images and their features, float (N, C)."""


class Settings(BaseModel):
    """Measure how well images of one class find each other."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    target: Path = Field(json_schema_extra={"positional": True})
    """a run folder (its best weights, by torch) or a .onnx model (by ONNX Runtime)"""
    data: Path | None = None
    """the images: a folder, .csv, .tar or .parquet file; a run's own when not given"""
    split: Literal["test", "train", "all"] = "test"
    """classes that training has not seen, those it has, or all, by the model's own rule"""
    protocol: metrics.ProtocolName = "auto"
    """leave-one-out searches each image among all others, query-gallery the data set's own queries in its
    gallery; auto is the latter for a run of the data set's own split that has them"""
    exclude_same: str | None = None
    """a metadata field, such as burst, listing or session: images that share a query's value are left out
    for it"""
    format: Format = "auto"
    """layout of the data set; auto is a run's own, or finds out elsewhere"""
    table: Table = None
    exclude: Exclude = []
    batch: int = Field(64, ge=1, le=4096)
    """images embedded at a time"""
    duplicates: bool = False
    """also images of the test that nearly repeat one that trained, by the pretrained backbone; told
    unasked where a frozen backbone's features are cached in the default folder"""
    at: list[Annotated[int, Field(ge=1)]] = [1, 2, 4, 8]
    """k of an R@k to tell; may be given again for another"""
    clusters: bool = False
    """also NMI and AMI of as many k-means clusters as classes; slow with thousands of them"""
    fitted: int = Field(0, ge=0, le=1_000_000)
    """also MAP_c and MAP_x of prototypes fitted to histograms, over that many random halvings of the
    classes, 1000 for a good mean; 0 is without"""
    marks: Path | None = None
    """measure by these judgements in place of the classes: a .csv file with the columns query, result and
    relevant (1 or 0), as the page of a server exports it"""

    @model_validator(mode="after")
    def _check_marks(self) -> Self:
        others = {"split", "protocol", "exclude_same", "duplicates", "at", "clusters", "fitted"}
        if self.marks is not None and (given := sorted(others & self.model_fields_set)):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"--marks measures what was judged, wherever it comes from: leave {flags} out")
        return self


@dataclass(frozen=True, slots=True)
class _Subject:
    """How images are decoded and embedded, and how the data is cut for that."""

    decode: Decoder
    embed: Embed  # uint8 (B, S, S, 3) to float32 (B, d + m + C): embeddings, histograms, untrained features
    split: SplitRule
    histogram: int = 0  # m, or 0 where nothing trained prototypes
    features: int = 0  # C, or 0 where there is no untrained backbone
    epoch: int = 0  # of a run's weights
    # the readable ones of some images, where features are cached or the flag asks for them; None of weights
    # that knew no images before: to them all would be alike
    features_of: Callable[[Sequence[Row], bool], _Featured | None] | None = None
    lacking: str = ""  # why a run's untrained backbone cannot be had


def run(settings: Settings) -> dict[str, Any]:
    """Embed every readable image of the split and search each among the others.

    Where a data set tells queries from a gallery, as In-Shop does, the split `test` searches those in this.
    The figures of a run on its own data set are noted in its record, from where `export` takes them into the
    model file.

    Gives `target`, `split`, `protocol` (the one that was taken), `exclude_same`, `dimension`, `images`,
    `classes`, what `RetrievalMetrics.told` and on demand `cluster_figures` and `fitted_figures` do,
    `untrained` (`recall_at`, `map_at_r` and `r_precision` of a run's backbone as training started it, by its
    raw pooled features, or null), `no_untrained` (why a run has none), `duplicates` (`images`, how many have
    a near-duplicate that trained, `least`, the cosine that takes, and the nearest `pairs`, or null where none
    were looked for), `unlabelled` (how many images of the data set are of no class), `unreadable`, `noted`
    (whether in the run's record), `not_noted` (why not, where the run itself was measured) and `seconds`.
    With `marks`, see `_measure_marks`.
    """
    started = time.monotonic()
    target = settings.target
    is_model = target.suffix == ".onnx"
    if not target.exists():
        raise NotFound(f"there is neither a run folder nor a model at {target}")
    # what may fail goes before the minutes that embedding takes
    if settings.clusters:
        import sklearn.cluster  # noqa: F401
    if settings.fitted:
        from training.evaluation.fitted import fitted_figures
    how: dict[str, Any] = settings.model_dump(include={"format", "table", "exclude"})
    if not is_model:
        from training.loop.run import read_record

        record = read_record(target)
        catalog = read_own(record, data=settings.data, **how)
    elif settings.data is None:
        raise BadSetting("evaluating a model file needs --data, the folder of the images")
    else:
        catalog = read(settings.data, **how)
    subject = _open_model(target) if is_model else _open_run(target)
    if settings.marks is not None:
        return _measure_marks(settings, settings.marks, catalog, subject) | {
            "seconds": round(time.monotonic() - started, 1)
        }
    if settings.fitted and not subject.histogram:
        raise BadSetting(f"--fitted needs prototypes, and nothing trained those of {target}: leave it out")
    rows = labelled(catalog, settings.split, subject.split)
    _choose(settings, rows, subject.split)
    trained = _read_trained(settings, catalog, subject)

    stream = Stream(rows, subject.decode)
    embeddings, histograms, features = _describe(subject, stream, settings.batch)
    labels = class_numbers(stream.rows, sorted({row.label for row in rows}))
    chosen = _choose(settings, stream.rows, subject.split)
    figures = metrics.retrieval_metrics(embeddings, labels, **chosen, at=settings.at).told()
    if settings.clusters:
        figures |= metrics.cluster_figures(embeddings, labels)
    if settings.fitted:
        figures |= fitted_figures(histograms, embeddings, labels, draws=settings.fitted)
    untrained = None
    if subject.features:
        before = metrics.retrieval_metrics(features, labels, **chosen, at=settings.at).told()
        untrained = {name: before[name] for name in ("recall_at", "map_at_r", "r_precision")}
    counts = {"images": len(labels), "classes": len(np.unique(labels))}
    not_noted = ""
    if not is_model:
        noted = figures | counts | ({"untrained": untrained} if untrained else {})
        not_noted = _note(settings, catalog, subject, noted)
    return {
        "target": str(target),
        "split": settings.split,
        "protocol": "query-gallery" if figures["gallery"] else "leave-one-out",
        "exclude_same": settings.exclude_same,
        "dimension": embeddings.shape[1],
        **counts,
        **figures,
        "untrained": untrained,
        "no_untrained": subject.lacking,
        "duplicates": _compare(stream.rows, features, trained) if trained else None,
        "unlabelled": catalog.unlabelled,
        "unreadable": [bad._asdict() for bad in stream.unreadable],
        "noted": not is_model and not not_noted,
        "not_noted": not_noted,
        "seconds": round(time.monotonic() - started, 1),
    }


def render(result: dict[str, Any]) -> str:
    """Tell the figures in percent."""
    lines = tell_unreadable(result["unreadable"])
    if "marks" in result:
        return "\n".join([*lines, *marks.tell_marks(result)])
    lines.append(
        f"{result['target']} on {result['split']}: {result['images']} images of {result['classes']}"
        f" classes, {result['dimension']} dimensions, {result['seconds']:.0f} s"
    )
    before = metrics.named_shares(result["untrained"] or {})
    for name, share in metrics.named_shares(result).items():
        line = f"  {name:<12}{100 * share:6.2f} %"
        if name in before:
            line += f"   untrained {100 * before[name]:6.2f} %, {100 * (share - before[name]):+.2f}"
        lines.append(line)
    if result["no_untrained"]:
        lines.append(f"  the untrained backbone was not measured: {result['no_untrained']}")
    if "map_x" in result:
        lines.append(f"  MAP_x is over {result['halvings']} halvings, of which {result['distinct']} differ")
    if result["gallery"]:
        lines += [f"  {result['queries']} queries were searched in a gallery of {result['gallery']} images"]
    if result["excluded"]:
        where = " in the gallery" if result["gallery"] else ""
        where += f" outside their own {result['exclude_same']}" if result["exclude_same"] else ""
        why = f"have no match{where}" if where else "are alone in their class"
        lines.append(f"  {result['excluded']} images {why} and were not asked for")
    if (found := result["duplicates"]) is not None:
        example = "".join(f", e.g. {pair['test']} ~ {pair['train']}" for pair in found["pairs"][:1])
        lines.append(f"  test images with a near-duplicate that trained: {found['images']}{example}")
    if result["unlabelled"]:
        lines.append(f"  {result['unlabelled']} images are of no class and were left out")
    if result["not_noted"]:
        lines.append(f"  these figures are not noted in the run: {result['not_noted']}")
    return "\n".join(lines)


def _describe(subject: _Subject, stream: Stream, batch: int) -> list[NDArray[np.float32]]:
    """Embed images: embeddings (N, d), histograms (N, m) and untrained features (N, C)."""
    described = embed_pictures(subject.embed, stream, batch=batch)
    width = described.shape[1] - subject.features
    return np.split(described, (width - subject.histogram, width), axis=1)


def _measure_marks(settings: Settings, path: Path, catalog: Catalog, subject: _Subject) -> dict[str, Any]:
    """Measure by the marks of a file, of images of any class and side.

    Gives `target`, `marks`, `dimension`, what `marked_metrics` does, `untrained` (the same of a run's
    backbone as training started it, or null), `no_untrained`, `unknown` (names that the data set does not
    have), `itself` (marks of an image and itself), `trained` (how many of the images are of classes that
    trained) and `unreadable`.
    """
    pairs, unknown, itself = marks.find_pairs(marks.read_marks(path), catalog.rows)
    used = sorted({place for pair in pairs for place in pair})
    stream = Stream([catalog.rows[place] for place in used], subject.decode)
    told = f" (it has no {unknown[0]!r})" if unknown else ""
    none = BadData(f"{path} judges no two images that {catalog.root} has and that can be read{told}")
    if not used:
        raise none
    embeddings, _, features = _describe(subject, stream, settings.batch)
    place_of = {row.key: place for place, row in enumerate(stream.rows)}
    keys = [row.key for row in catalog.rows]
    found = {
        (place_of[keys[query]], place_of[keys[result]]): relevant
        for (query, result), relevant in pairs.items()
        if keys[query] in place_of and keys[result] in place_of
    }
    if not found:
        raise none
    try:
        trained = {row.key for row in select(catalog, "train", subject.split)}
    except BadData:  # of a data set that the model's rule cannot cut, as one without classes
        trained = set()
    return {
        "target": str(settings.target),
        "marks": str(path),
        "dimension": embeddings.shape[1],
        **marks.marked_metrics(embeddings, found),
        "untrained": marks.marked_metrics(features, found) if subject.features else None,
        "no_untrained": subject.lacking,
        "unknown": unknown,
        "itself": itself,
        "trained": len(trained & place_of.keys()),
        "unreadable": [bad._asdict() for bad in stream.unreadable],
    }


def _open_model(path: Path) -> _Subject:
    from serving.model.encoder import Encoder  # only here: a run is measured without ONNX Runtime

    encoder = Encoder(path)
    prototypes = encoder.spec.prototypes
    outputs = ("embeddings", "histograms") if prototypes else ("embeddings",)

    def embed(pixels: NDArray[Any]) -> NDArray[np.float32]:
        found = encoder.run(pixels, *outputs)
        return np.concatenate([found[name] for name in outputs], axis=1)

    return _Subject(encoder.preprocess, embed, encoder.spec.split, histogram=prototypes)


def _open_run(path: Path) -> _Subject:
    """Open a run's best weights, and beside them its backbone as training started it."""
    # only here: a model file is measured without torch
    from training.data.feature_cache import find_features
    from training.data.pictures import viewing_decoder
    from training.loop.processes import keep_freed_memory
    from training.loop.run import load_run
    from training.network import embedder as network
    from training.network.start import open_start

    keep_freed_memory()
    run = load_run(path)
    recipe = run.recipe
    shared = recipe.caches_features
    describe = network.describer_function if recipe.learns_prototypes else network.embedder_function
    trained, decode = describe(run.embedder, mapped=shared), viewing_decoder(recipe)
    histogram = len(run.embedder.codebook) if recipe.learns_prototypes else 0
    subject = _Subject(decode, trained, recipe.split, histogram=histogram, epoch=run.epoch)
    try:
        start = open_start(run.embedder, recipe)
    except CrossbatchError as error:
        return replace(subject, lacking=str(error))

    def embed(pixels: NDArray[Any]) -> NDArray[np.float32]:
        images = start.maps(pixels)
        return np.concatenate((trained(images), start.pooled(images)), axis=1)

    def features_of(rows: Sequence[Row], wanted: bool) -> _Featured | None:
        views = recipe.views
        cached = find_features(rows, run.embedder, recipe, views=views, folder=None) if shared else None
        if cached is not None:
            return cached.rows, embed_pictures(start.pooled, cached, label="Training images")
        if not wanted:
            return None
        stream = Stream(rows, decode)
        found = embed_pictures(
            lambda pixels: start.pooled(start.maps(pixels)), stream, label="Training images"
        )
        return stream.rows, found

    known = None if recipe.weights == "none" else features_of
    return replace(subject, embed=embed, features=start.channels, features_of=known)


def _choose(settings: Settings, rows: Sequence[Row], rule: SplitRule) -> dict[str, Any]:
    """Choose who is searched among whom: `roles` and `groups` for `retrieval_metrics`."""
    roles = metrics.roles_of(rows, settings.split, rule, protocol=settings.protocol)
    return {"roles": roles, "groups": metrics.groups_of(rows, settings.exclude_same)}


def _read_trained(settings: Settings, catalog: Catalog, subject: _Subject) -> _Featured | None:
    """Read the images that trained and their features (G, C), where these are wanted or cached."""
    if settings.duplicates and settings.split != "test":
        raise BadSetting("--duplicates compares the split test with what trained: leave out one of the two")
    if settings.duplicates and subject.features_of is None:
        raise BadSetting(
            f"--duplicates needs a backbone that knew images before this training, and {settings.target} has"
            f" none{': ' if subject.lacking else ''}{subject.lacking}"
        )
    if settings.split != "test" or subject.features_of is None:
        return None
    try:
        return subject.features_of(select(catalog, "train", subject.split), settings.duplicates)
    except BadData:
        if settings.duplicates:
            raise
        return None  # of a data set that has only a test


def _compare(rows: Sequence[Row], features: NDArray[np.float32], trained: _Featured) -> dict[str, Any]:
    """Count the near-duplicates of what trained, and name the nearest."""
    trained_rows, trained_features = trained
    found = find_duplicates(features, trained_features)
    pairs = [
        {"test": rows[test].key, "train": trained_rows[train].key, "cosine": cosine}
        for test, train, cosine in found[:_TOLD]
    ]
    return {"images": len(found), "least": NEAR, "pairs": pairs}


def find_duplicates(
    tests: NDArray[np.floating[Any]], trains: NDArray[np.floating[Any]]
) -> list[tuple[int, int, float]]:
    """Find test features (N, C) whose most alike training feature, of (G, C), is as near as `NEAR`.

    Gives the place in `tests`, that in `trains` and the cosine of each, the highest first.
    """
    tests, trains = metrics.unit_rows(tests), metrics.unit_rows(trains)
    nobody = np.zeros(len(tests), dtype=np.int64), np.ones(len(trains), dtype=np.int64)
    nearest = metrics.exact_search(tests, trains, *nobody)(np.arange(len(tests)), 1)[:, 0]
    cosines = (tests * trains[nearest]).sum(axis=1)
    found = [place for place in np.argsort(-cosines, kind="stable").tolist() if cosines[place] >= NEAR]
    return [(place, int(nearest[place]), float(cosines[place])) for place in found]


def _note(settings: Settings, catalog: Catalog, subject: _Subject, figures: dict[str, Any]) -> str:
    """Put figures into the record of their run; says why they are not its own, or could not be noted."""
    from training.loop.checkpoint import locked
    from training.loop.run import read_record, write_record

    usual = Settings.model_fields["at"].default
    if settings.protocol != "auto" or settings.exclude_same is not None or settings.at != usual:
        return "it keeps those of --protocol auto without --exclude-same and --at"
    try:
        with locked(settings.target):  # else a training, whose record is in its memory, would write over it
            record = read_record(settings.target)
            if not is_own(record, catalog, subject.split):
                own = f"{record['data']['root']}, read as {record['data']['format']}"
                return f"its own images are those that {own}, held when it was started"
            if (kept := record["metrics"].get("epoch", subject.epoch)) != subject.epoch:  # trained meanwhile
                return f"they are of epoch {subject.epoch}, and by now the run keeps epoch {kept}"
            record["metrics"][settings.split] = figures
            write_record(settings.target, record)
    except BlockingIOError:
        return "it is being trained"
    except (CrossbatchError, OSError) as error:
        return str(error)
    return ""
