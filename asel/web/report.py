"""The report: one HTML page about a cache, with everything it needs inside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import metadata, resources
from typing import Any

from asel.redaction import redact
from asel.stores.records import Rejected
from asel.tuning.outcomes import Measured, Skipped
from asel.web.entries import Entry, config_words, differing_fields

__all__ = ["report_page"]

MAX_SAMPLES = 150
"""Samples of a candidate that the page holds: more look the same in a plot."""
_MIN_SAMPLES = 20
_MAX_ALL_SAMPLES = 500_000
"""Samples in a page, of about nine characters each: 1,000 keys with 24 candidates have millions."""
_MAX_EXAMPLES = 3


def report_page(entries: Sequence[Entry], unreadable: Iterable[Rejected], *, title: str, created: float) -> str:
    """Return the page, which can be opened from a file and needs no network.

    `created` is in seconds since the epoch.
    """
    candidates = sum(len(one.measured) for one in entries)
    limit = max(_MIN_SAMPLES, min(MAX_SAMPLES, _MAX_ALL_SAMPLES // max(1, candidates)))
    data = {
        "title": redact(title),
        "asel": metadata.version("asel"),
        "created": created,
        "keys": [_key_facts(number, one, limit) for number, one in enumerate(entries)],
        "unreadable": [{"where": redact(one.where), "reason": redact(one.reason)} for one in unreadable],
    }
    libraries = "\n".join(_text_of("vendor", name) for name in ("d3.min.js", "plot.umd.min.js"))
    licences = _text_of("vendor", "LICENSES.txt")
    parts = {
        "css": _text_of("assets", "report.css"),
        "data": _script_json(data),
        "libraries": f"/*\n{licences}*/\n{libraries}",
        "script": _text_of("assets", "report.js"),
    }
    page = _text_of("assets", "report.html")
    for name, text in parts.items():
        before, mark, after = page.partition(f"/*{{{name}}}*/")
        assert mark, name
        page = f"{before}{text}{after}"
    return page


def _text_of(folder: str, name: str) -> str:
    return resources.files("asel.web").joinpath(folder, name).read_text(encoding="utf-8")


def _script_json(data: Any) -> str:
    """Return JSON that cannot end its script element, with any text in the records."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _key_facts(number: int, entry: Entry, max_samples: int) -> dict[str, Any]:
    report = entry.report
    measured, failed = entry.measured, entry.failed
    best = measured[0] if measured and report is not None else None
    heuristic = None if report is None or report.incumbent is None else config_words(report.incumbent)
    return {
        "order": number,
        "key": entry.record.key.call_key,
        "op": entry.op,
        "call": redact(entry.record.call),
        "config_text": entry.config,
        "cache": redact(entry.cache),
        "device": entry.record.key.device,
        "device_name": entry.device,
        "environment": entry.record.environment,
        "created": entry.record.created,
        "writer": redact(entry.record.writer),
        "objective": None if report is None else report.objective,
        "tune_s": entry.record.seconds,
        "speedup": entry.speedup,
        "margin": None if report is None else report.margin,
        "noise": entry.noise,
        "heuristic": heuristic,
        "winner_s": None if best is None else best.shown_s,
        "counts": {"all": len(entry.outcomes), "failed": len(failed)},
        "measured": _measured_facts(entry, measured, max_samples),
        "failed": [
            {
                "config": config_words(one.cfg),
                "stage": one.stage,
                "error": one.error_type,
                "message": redact(one.message),
            }
            for one in failed
        ],
        "skipped": _skipped_facts(entry.skipped),
    }


def _measured_facts(entry: Entry, measured: Sequence[Measured[Any]], max_samples: int) -> list[dict[str, Any]]:
    labels = _unique(differing_fields([one.cfg for one in measured]))
    return [
        {
            "config": config_words(one.cfg),
            "label": label,
            "winner": entry.is_winner(one.cfg),
            "heuristic": entry.is_heuristic(one.cfg),
            "ranked_s": one.shown_s,
            "samples_s": spread_of(one.samples_s, max_samples),
            "sample_count": len(one.samples_s),
            "compile_s": one.compile_s,
            "notes": entry.marks(one),
        }
        for one, label in zip(measured, labels, strict=True)
    ]


def _unique(labels: Iterable[str]) -> list[str]:
    """Return distinct labels for the rows of a plot: some may have been shortened to the same text."""
    seen: dict[str, int] = {}
    found = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        found.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return found


def spread_of(samples_s: Sequence[float], limit: int) -> list[float]:
    """Return at most `limit` samples with the same distribution, including the fastest and the slowest."""
    ordered = sorted(samples_s)
    if len(ordered) > limit:
        step = (len(ordered) - 1) / (limit - 1)
        ordered = [ordered[round(number * step)] for number in range(limit)]
    return [float(f"{seconds:.4g}") for seconds in ordered]


def _skipped_facts(skipped: Iterable[Skipped[Any]]) -> list[dict[str, Any]]:
    """Return the reasons with the number of candidates for each: a search may leave thousands untried."""
    by_reason: dict[str, list[Any]] = {}
    for one in skipped:
        by_reason.setdefault(redact(one.reason), []).append(one.cfg)
    return [
        {"reason": reason, "count": len(cfgs), "examples": [config_words(cfg) for cfg in cfgs[:_MAX_EXAMPLES]]}
        for reason, cfgs in by_reason.items()
    ]
