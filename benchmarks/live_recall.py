"""R@1 counted over live gRPC searches, to be held beside the R@1 that `crossbatch evaluate` gives.

    crossbatch index --model MODEL.onnx --data DIR --split test galleries/NAME
    crossbatch serve --model MODEL.onnx --galleries galleries
    python benchmarks/live_recall.py MODEL.onnx DIR NAME [ADDRESS]

Every unseen image is sent as a photo; the query itself is left out of its own neighbours.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from serving.catalog.catalog import Row, read, select
from serving.client.client import Client
from serving.model.spec import read_spec
from serving.progress import progress


def live_recall(client: Client, gallery: str, rows: Sequence[Row], *, per_call: int = 64) -> tuple[int, int]:
    """Search for each row's image in a gallery of all rows.

    Returns:
        How many queries found their own class first, and how many there were; as in
        `training.evaluation.metrics`, an image alone in its class is no query.
    """
    members = Counter(row.label for row in rows)
    queries = [row for row in rows if members[row.label] > 1]
    found = 0
    for start in progress(range(0, len(queries), per_call), "Searching", unit="call"):
        some = queries[start : start + per_call]
        answers = client.search(gallery, images=[row.image.read_bytes() for row in some], k=2)
        for row, hits in zip(some, answers, strict=True):
            others = [hit for hit in hits if hit.key != row.key]
            found += others[0].label == row.label
    return found, len(queries)


def main(model: str, data: str, gallery: str, address: str = "127.0.0.1:50051") -> None:
    """Count over the unseen classes of a data set, as the model's own split rule has them."""
    rows = select(read(Path(data)), "test", read_spec(Path(model)).split)
    with Client(address, timeout=120) as client:
        found, queries = live_recall(client, gallery, rows)
    print(f"R@1 over {queries} live searches: {100 * found / queries:.2f} % ({found})")


if __name__ == "__main__":
    main(*sys.argv[1:])
