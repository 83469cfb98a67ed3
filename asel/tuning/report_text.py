"""The printed form of a report: a table of the candidates, with a bar for each time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from asel.kernels.candidates import same_config
from asel.kernels.config_text import config_text, config_texts, one_line
from asel.tuning.outcomes import Failed, Measured, Skipped, TuneReport, in_words, measurement_of, shown_margin

__all__ = ["MAX_LINE_CHARS", "report_text"]

MAX_LINE_CHARS = 240
"""The longest line of a printed report. A call may be that long."""
_MAX_CONFIG_CHARS = 80
_MAX_LESSONS = 3
_MAX_SKIPPED = 50


def report_text(report: TuneReport[Any]) -> str:
    """Return the table, in lines of at most `MAX_LINE_CHARS`; many skipped candidates are counted by reason."""
    skipped = [o for o in report.outcomes if isinstance(o, Skipped)]
    outcomes = report.outcomes
    if len(skipped) > _MAX_SKIPPED:
        outcomes = tuple(o for o in report.outcomes if not isinstance(o, Skipped))
    texts, shared = config_texts([o.cfg for o in outcomes], _MAX_CONFIG_CHARS)
    shown = _Configs(tuple(zip((o.cfg for o in outcomes), texts, strict=True)))
    width = max(map(len, texts), default=0)
    rows = list(zip(outcomes, texts, strict=True))
    measured = [(o, text) for o, text in rows if isinstance(o, Measured)]
    longest = max((o.shown_s for o, _ in measured), default=0.0)
    op = report.key.op_id or "tune"
    lines = [f"{op}({report.call})" if report.call else op]
    lines.append(f"  {shown[report.winner]} wins {_against(report, shown)}, {report.seconds:.2f} s of tuning")
    if report.learned_from:
        lines.append(f"  {_lesson(report)}")
    for timed, text in sorted(measured, key=lambda pair: pair[0].shown_s):
        bar = "\u2588" * max(1, round(24 * timed.shown_s / longest)) if longest else ""
        marks = ", ".join(_marks(report, timed, shown))
        lines.append(f"  {text:<{width}}  {in_words(timed.shown_s):>9}  {bar:<24}  {marks}".rstrip())
    for outcome, text in rows:
        if isinstance(outcome, Failed):
            message = one_line(outcome.message, MAX_LINE_CHARS)
            lines.append(f"  {text:<{width}}  {outcome.error_type} in {outcome.stage}: {message}")
        elif isinstance(outcome, Skipped):
            lines.append(f"  {text:<{width}}  skipped: {one_line(outcome.reason, MAX_LINE_CHARS)}")
    if len(skipped) > _MAX_SKIPPED:
        reasons = Counter(o.reason.partition(": ")[0] for o in skipped).most_common()
        lines += [f"  {count:,} skipped: {one_line(reason, MAX_LINE_CHARS)}" for reason, count in reasons]
    lines += [f"  all with {shared}"] if shared else []
    return "\n".join(line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 3]}..." for line in lines)


class _Configs:
    """A mapping from configs, which need not be hashable, to their texts."""

    def __init__(self, texts: tuple[tuple[Any, str], ...]) -> None:
        self._texts = texts

    def __getitem__(self, cfg: Any) -> str:
        texts = (text for other, text in self._texts if same_config(other, cfg))
        return next(texts, None) or config_text(cfg, _MAX_CONFIG_CHARS)


def _against(report: TuneReport[Any], shown: _Configs) -> str:
    if report.incumbent is None:
        return "without an incumbent"
    if same_config(report.incumbent, report.winner):
        return f"as the incumbent, ties within {report.noise:.1%}"
    if measurement_of(report, report.incumbent) is None:
        return f"over {shown[report.incumbent]}, which was not measured"
    return f"by {shown_margin(report):.1%} over {shown[report.incumbent]}, noise {report.noise:.1%}"


def _marks(report: TuneReport[Any], outcome: Measured[Any], shown: _Configs) -> list[str]:
    marks = ["winner"] if same_config(outcome.cfg, report.winner) else []
    marks += ["incumbent"] if report.incumbent is not None and same_config(outcome.cfg, report.incumbent) else []
    if outcome.eliminated is not None:
        marks.append(f"out in round {outcome.eliminated}" if outcome.eliminated else "out at its warm-up")
    marks += [f"same program as {shown[outcome.alias_of]}"] if outcome.alias_of is not None else []
    marks += ["timed earlier"] if outcome.reused else []
    marks += [f"expected {in_words(outcome.predicted_s)}"] if outcome.predicted_s is not None else []
    if report.best is not None and outcome.how != report.best.how:
        return [*marks, f"timed {outcome.how}, so not ranked"]
    return marks + ([f"timed {outcome.how}"] if outcome.how != report.objective else [])


def _lesson(report: TuneReport[Any]) -> str:
    count = len(report.learned_from)
    tunes = "1 earlier tune" if count == 1 else f"{count} earlier tunes"
    learned = f"learned from {tunes}: {'; '.join(report.learned_from[:_MAX_LESSONS])}{'; ...' * (count > _MAX_LESSONS)}"
    if report.prediction_error is None:
        return learned
    return f"{learned} (off by {report.prediction_error:.0%})"
