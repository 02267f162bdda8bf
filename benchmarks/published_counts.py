"""Images and classes that the readers find in the published lists, beside the counts that were published.

    python benchmarks/published_counts.py FOLDER

FOLDER holds any of CUB_200_2011, Cars196, InShop and Stanford_Online_Products, each with its lists; no image
is needed. Ends with status 1 where a count differs, or where there is nothing to count.

Cars196's devkit names no classes for its test folder. Where `cars_annos.mat` is not there, one is made in a
temporary folder from lists `derived_cars196_train.txt` and `derived_cars196_test.txt` in the form of SOP's.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from serving.catalog.published import Listed, parse

Counts = Mapping[str, tuple[int, int]]
"""Images and classes by split; the split of what is of no class is empty. The devkit's are by folder."""

PUBLISHED: Final[Mapping[tuple[str, str], Counts]] = {
    ("CUB_200_2011", "cub"): {"train": (5864, 100), "test": (5924, 100)},
    ("Cars196", "cars"): {"train": (8054, 98), "test": (8131, 98)},
    ("Cars196/devkit", "cars"): {"cars_train": (8144, 196), "cars_test": (8041, 0)},
    ("InShop", "inshop"): {"train": (25882, 3997), "query": (14218, 3985), "gallery": (12612, 3985)},
    ("Stanford_Online_Products", "sop"): {"train": (59551, 11318), "test": (60502, 11316)},
    # Another shop's shoes in SOP's form, as euwern/proxynca_pp has them: not Stanford Online Products.
    ("SOP_format_not_official", "sop"): {"train": (9131, 2051), "test": (9091, 2050)},
}


def count(listed: Sequence[Listed]) -> Counts:
    """Return how many images and classes each split has."""
    return {
        split: (
            sum(each.split == split for each in listed),
            len({each.label for each in listed if each.split == split and each.label}),
        )
        for split in dict.fromkeys(each.split for each in listed)
    }


def by_folder(listed: Sequence[Listed]) -> list[Listed]:
    """Return the images with their folder for a split; classes of the test folder are left out."""
    folders = [each.path.partition("/")[0] for each in listed]
    return [
        each._replace(split=folder, label=each.label if folder == "cars_train" else "")
        for each, folder in zip(listed, folders, strict=True)
    ]


def compare(found: Counts, published: Counts) -> tuple[list[str], bool]:
    """Return a line for each split, and whether all counts are those published."""
    lines = [
        f"  {split or 'no class':<10}{found.get(split, (0, 0))[0]:>7,} images"
        f"{found.get(split, (0, 0))[1]:>8,} classes; published"
        f"{published.get(split, (0, 0))[0]:>7,} and{published.get(split, (0, 0))[1]:>7,}"
        for split in dict.fromkeys((*published, *found))
    ]
    return lines, dict(found) == dict(published)


def make_cars_annos(cars: Path, folder: Path) -> None:
    """Write `cars_annos.mat`, in the structure of the published one, from lists in the form of SOP's.

    Args:
        cars: Holds `derived_cars196_train.txt`, `derived_cars196_test.txt` and `devkit/cars_meta.mat`.
        folder: Where to write.
    """
    from scipy.io import loadmat, savemat

    rows = [
        (line.split()[3], int(line.split()[1]))
        for part in ("train", "test")
        for line in (cars / f"derived_cars196_{part}.txt").read_text().splitlines()[1:]
    ]
    boxes = [(name, "O") for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")]
    annotations = np.empty((1, len(rows)), [("relative_im_path", "O"), *boxes, ("class", "O"), ("test", "O")])
    for place, (path, number) in enumerate(rows):
        annotations[0, place] = (path, 1, 1, 2, 2, number, place % 2)
    names = loadmat(cars / "devkit" / "cars_meta.mat")["class_names"]
    savemat(folder / "cars_annos.mat", {"annotations": annotations, "class_names": names})


def main(folder: str, published: Mapping[tuple[str, str], Counts] = PUBLISHED) -> int:
    """Print the counts of all that is in the folder; returns the exit status."""
    checked, all_equal = 0, True
    with tempfile.TemporaryDirectory() as made:
        for (name, format), counts in published.items():
            root = Path(folder) / name
            if not root.is_dir():
                print(f"{name}: not there, not checked")
                continue
            note = ""
            if name == "Cars196" and not any(root.glob("**/cars_annos.mat")):
                make_cars_annos(root, Path(made))
                root, note = Path(made), ", by a cars_annos.mat made from the derived lists"
            _, listed = parse(root, format)
            lines, equal = compare(count(by_folder(listed) if root.name == "devkit" else listed), counts)
            print(f"{name} as {format}{note}: {'as published' if equal else 'DIFFERENT'}", *lines, sep="\n")
            checked, all_equal = checked + 1, all_equal and equal
    return 0 if checked and all_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
