"""What a person reads of galleries on a terminal."""

from collections.abc import Mapping
from typing import Any

__all__ = ["render"]

_MOST_FIELDS = 40


def render(result: Mapping[str, Any]) -> str:
    """Return the lines for a result of `serving.gallery.command.run`."""
    name = result.get("name")
    match result["action"]:
        case "verify":
            return _verification(result)
        case "rebuild":
            (entry,) = result["galleries"]
            return f"the index of the gallery {entry['name']} is new\n{_sheet(entry)}"
        case "snapshot":
            size = f"{result['bytes'] / 1e6:,.1f} MB"
            return f"wrote the {result['items']:,} items of the gallery {name} to {result['file']} ({size})"
        case "restore":
            return f"made the gallery {name} with {result['items']:,} items of {result['file']}"
        case "switch" if result["previous"] is None:
            return f"the gallery {result['other']} is now {name}"
        case "switch":
            return (
                f"the gallery {result['other']} is now {name}, and the one before is {result['other']}; "
                f"to undo it: crossbatch gallery rollback {name}"
            )
        case "rollback":
            return f"the gallery {name} is again the one before; the other is now {result['other']}"
        case "drop":
            return f"{'dropped' if result['dropped'] else 'kept'} the gallery {name}"
        case "info":
            return _sheet(result["galleries"][0])
    return "\n".join(map(_line, result["galleries"])) or "no gallery"


def _verification(result: Mapping[str, Any]) -> str:
    checked = (
        f"{result['items']:,} items ({result['indexed']:,} in the index, {result['fresh']:,} newer, "
        f"{result['removals']:,} removals), {result['thumbnails']:,} thumbnails"
    )
    problems = result["problems"]
    lines = [f"verified the gallery {result['name']}: {checked}"]
    lines += [f"  {problem}" for problem in problems]
    lines.append(f"{len(problems):,} problems" if len(problems) != 1 else "1 problem")
    return "\n".join(lines) if problems else f"{lines[0]}; no problem"


def _line(entry: Mapping[str, Any]) -> str:
    if "error" in entry:
        return f"{entry['name']}: {entry['error']}"
    return (
        f"{entry['name']}: {entry['items']:,} items of dimension {entry['dimension']}, "
        f"model {entry['model_name']} ({entry['fingerprint'][:12]}); {entry['index_type']} index over "
        f"{entry['index_items']:,}, {entry['fresh']:,} newer, {entry['deleted']:,} deleted; "
        f"{(entry['index_bytes'] + entry['store_bytes']) / 1e6:,.1f} MB; created {entry['created']}"
    )


def _sheet(entry: Mapping[str, Any]) -> str:
    """Return all that is known of one gallery, a line each."""
    lines = {
        "items": f"{entry['items']:,} of dimension {entry['dimension']}; {entry['fresh']:,} newer than the "
        f"index, {entry['deleted']:,} deleted and still in memory",
        "fields": _fields(entry.get("fields", {})),
        "model": f"{entry['model_name']}, fingerprint {entry['fingerprint']}",
        "index": f"{entry['index_type']} over {entry['index_items']:,} items "
        f"(wanted: {entry['wanted_index']})",
        "recall@10": f"{entry['recall']:.4f} (wanted: {entry['wanted_recall']:g})",
        "latency": f"{entry['latency_ms']:.3f} ms a query on one thread" if entry["latency_ms"] else "",
        "parameters": ", ".join(f"{name} {value:g}" for name, value in entry["parameters"].items()),
        "tried": "; ".join(map(_trial, entry["trials"])),
        "note": entry["note"],
        "size": f"{entry['store_bytes'] / 1e6:,.1f} MB of items, "
        f"{entry['index_bytes'] / 1e6:,.1f} MB of index",
        "previous": entry["previous_name"] and f"{entry['previous_name']} (by rollback it is back)",
        "published": f"{entry['generation']:,} times, format {entry['format_version']}",
        "created": entry["created"],
        "folder": entry["path"],
    }
    width = max(map(len, lines))
    return "\n".join(
        [entry["name"], *(f"  {label:<{width}}  {text}" for label, text in lines.items() if text)]
    )


def _fields(fields: Mapping[str, Any]) -> str:
    """Name the fields of the metadata and what each holds, as many as one reads."""
    named = [f"{name} ({' or '.join(kinds) or 'object'})" for name, kinds in fields.items()]
    more = f" and {len(named) - _MOST_FIELDS} more" if len(named) > _MOST_FIELDS else ""
    return ", ".join(named[:_MOST_FIELDS]) + more


def _trial(trial: Mapping[str, Any]) -> str:
    return f"{trial['type']} {trial['recall']:.4f} at {trial['latency_ms']:.3f} ms"
