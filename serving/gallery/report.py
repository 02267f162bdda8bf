"""What a person reads of what `crossbatch gallery` did."""

from collections.abc import Mapping
from typing import Any

__all__ = ["render"]

_MOST_FIELDS = 40
_MOST_PAIRS = 20
_SIDES = (("key", "label"), ("other", "other_label"))


def render(result: Mapping[str, Any]) -> str:
    """Return what a person reads of a result of `run` on a terminal."""
    name, other, file = (result.get(key) for key in ("name", "other", "file"))
    match result["action"]:
        case "list":
            return "\n".join(map(_line, result["galleries"])) or "no gallery"
        case "info":
            return _sheet(result["galleries"][0])
        case "verify":
            return _verification(result)
        case "duplicates":
            return _alike(result)
        case "rebuild":
            (entry,) = result["galleries"]
            return f"the index of the gallery {entry['name']} is new\n{_sheet(entry)}"
        case "snapshot" | "export":
            size = f"{result['bytes'] / 1e6:,.1f} MB"
            return f"wrote the {result['items']:,} items of the gallery {name} to {file} ({size})"
        case "publish" | "follow":
            done = "published" if result["action"] == "publish" else "served"
            told = f"generation {result['generation']} of the gallery {name} ({result['items']:,} items)"
            return f"{told} is {'now' if result['new'] else 'still'} {done}"
        case "restore":
            return f"made the gallery {name} with {result['items']:,} items of {file}"
        case "import":
            return f"put {result['rows']:,} items of {file} into the gallery {name}, now {result['items']:,}"
        case "copy":
            told = f"{other} holds the {result['items']:,} items of {name}"
            rest = [f"checksum {result['checksum'][:12]}", f"{result['written']:,} were written"]
            rest += [f"{result['deleted']:,} others deleted"] if result["deleted"] else []
            rest += [f"{other} keeps no thumbnails"] if result["without_thumbnails"] else []
            return f"{told}: {', '.join(rest)}"
        case "map":
            left = f", {result['left_out']:,} left out" if result["left_out"] else ""
            told = f"{result['items']:,} items by {result['method']}, {result['moved']:,} moved{left}"
            return f"the map of the gallery {name} has {told}"
        case "switch" if result["previous"] is None:
            return f"the gallery {other} is now {name}"
        case "switch":
            return (
                f"the gallery {other} is now {name}, and the one before is {other}; "
                f"to undo it: crossbatch gallery rollback {name} --galleries {result['galleries']}"
            )
        case "rollback":
            return f"the gallery {name} is again the one before; the other is now {other}"
    return f"{'dropped' if result['dropped'] else 'kept'} the gallery {name}"


def _verification(result: Mapping[str, Any]) -> str:
    problems = result["problems"]
    first = (
        f"verified the gallery {result['name']}: {result['items']:,} items ({result['indexed']:,} in the "
        f"index, {result['fresh']:,} newer, {result['removals']:,} removals), "
        f"{result['thumbnails']:,} thumbnails"
    )
    if not problems:
        return f"{first}; no problem"
    return "\n".join([first, *(f"  {problem}" for problem in problems), _counted(len(problems), "problem")])


def _alike(result: Mapping[str, Any]) -> str:
    """Return the first pairs of duplicates, a line each."""
    pairs, of = result["pairs"], f"the {result['items']:,} items of the gallery {result['name']}"
    if not pairs:
        return f"no two of {of} score {result['above']:g} or more"
    lines = [
        f"{_counted(len(pairs), 'pair')} of {of} score {result['above']:g} or more; "
        f"they make {_counted(len(result['clusters']), 'cluster')}"
    ]
    for pair in pairs[:_MOST_PAIRS]:
        both = (f"{pair[k]} ({pair[v]})" if pair[v] else pair[k] for k, v in _SIDES)
        lines.append(f"  cluster {pair['cluster']}  {pair['score']:.4f}  {'  '.join(both)}")
    if len(pairs) > _MOST_PAIRS:
        lines.append(f"  and {_counted(len(pairs) - _MOST_PAIRS, 'pair')} more (--out and --json list all)")
    return "\n".join([*lines, *([f"wrote {result['file']}"] if result["file"] else [])])


def _counted(count: int, one: str, several: str = "") -> str:
    return f"1 {one}" if count == 1 else f"{count:,} {several or f'{one}s'}"


def _line(entry: Mapping[str, Any]) -> str:
    if "error" in entry:
        return f"{entry['name']}: {entry['error']}"
    size = entry["index_bytes"] + entry["store_bytes"]  # of which Milvus says nothing
    return (
        f"{entry['name']}: {entry['items']:,} items of dimension {entry['dimension']}, "
        f"model {entry['model_name']} ({entry['fingerprint'][:12]}); {entry['index_type']} index over "
        f"{entry['index_items']:,}, {entry['fresh']:,} newer, {entry['deleted']:,} deleted; "
        f"{f'{size / 1e6:,.1f} MB; ' if size else ''}created {entry['created']}"
    )


def _sheet(entry: Mapping[str, Any]) -> str:
    """Return all that is known of one gallery, a line each."""
    in_folder = entry["store_bytes"] > 0  # Milvus measures no recall, and tells no size
    trials = (f"{it['type']} {it['recall']:.4f} at {it['latency_ms']:.3f} ms" for it in entry["trials"])
    lines = {
        "items": f"{entry['items']:,} of dimension {entry['dimension']}; {entry['fresh']:,} newer than the "
        f"index, {entry['deleted']:,} deleted and still in memory",
        "fields": _fields(entry.get("fields", {})),
        "model": f"{entry['model_name']}, fingerprint {entry['fingerprint']}",
        "index": f"{entry['index_type']} over {entry['index_items']:,} items "
        f"(wanted: {entry['wanted_index']})",
        "thumbnails": f"of {side} pixels" if (side := entry.get("thumbnail_side")) else "",
        "recall@10": f"{entry['recall']:.4f} (wanted: {entry['wanted_recall']:g})" if in_folder else "",
        "latency": f"{entry['latency_ms']:.3f} ms a query on one thread" if entry["latency_ms"] else "",
        "parameters": ", ".join(f"{name} {value:g}" for name, value in entry["parameters"].items()),
        "tried": "; ".join(trials),
        "note": entry["note"],
        "size": f"{entry['store_bytes'] / 1e6:,.1f} MB of items, "
        f"{entry['index_bytes'] / 1e6:,.1f} MB of index"
        if in_folder
        else "",
        "previous": entry["previous_name"] and f"{entry['previous_name']} (by rollback it is back)",
        "follows": (note := entry["follows"])
        and f"{note['folder']}, generation {note['generation']} of {entry['lag_seconds']:,.0f} s ago",
        "format": f"{entry['format_version']}, {_counted(entry['generation'], 'index made', 'indexes made')}"
        if in_folder
        else "",
        "created": entry["created"],
        "folder" if in_folder else "place": entry["path"],
    }
    width = max(map(len, lines))
    return "\n".join([entry["name"], *(f"  {name:<{width}}  {text}" for name, text in lines.items() if text)])


def _fields(fields: Mapping[str, Any]) -> str:
    """Name the fields of the metadata and what each holds, as many as one reads."""
    named = [f"{name} ({' or '.join(kinds) or 'object'})" for name, kinds in fields.items()]
    more = f" and {len(named) - _MOST_FIELDS} more" if len(named) > _MOST_FIELDS else ""
    return ", ".join(named[:_MOST_FIELDS]) + more
