"""Spans as a waterfall: a tree whose bars show when each span ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asel.redaction import redact

if TYPE_CHECKING:
    from rich.console import Console

    from asel.cli.trace.spans import Span

__all__ = ["Node", "Trace", "label", "print_trace", "traces_of"]

_UNBOUNDED_WIDTH = 132
_MIN_BAR = 8
_DURATION = 9


@dataclass(slots=True)
class Node:
    """A span and its children, in order of their start."""

    span: Span
    children: list[Node] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        pending = [(depth, self)]
        while pending:
            level, node = pending.pop()
            yield level, node
            pending += [(level + 1, child) for child in reversed(node.children)]


@dataclass(slots=True)
class Trace:
    """The spans of one trace. A span whose parent is not in the file is a root, too."""

    trace_id: str
    roots: list[Node]

    @property
    def spans(self) -> list[Span]:
        return [node.span for root in self.roots for _, node in root.walk()]

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for span in self.spans)

    @property
    def seconds(self) -> float:
        return (max(span.end_ns for span in self.spans) - self.start_ns) / 1e9


def traces_of(spans: Iterable[Span]) -> list[Trace]:
    """Return the traces in order of their start."""
    by_trace: dict[str, dict[str, Node]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        by_trace.setdefault(span.trace_id, {})[span.span_id] = Node(span)
    traces = [Trace(trace_id, _roots(nodes)) for trace_id, nodes in by_trace.items()]
    return sorted(traces, key=lambda trace: trace.start_ns)


def _roots(nodes: dict[str, Node]) -> list[Node]:
    roots = []
    for node in nodes.values():
        parent = nodes.get(node.span.parent_id)
        if parent is None or _is_above(nodes, node, parent):
            roots.append(node)
        else:
            parent.children.append(node)
    return roots


def _is_above(nodes: dict[str, Node], node: Node, parent: Node) -> bool:
    """Return whether a node is its own ancestor, which may happen in a damaged file."""
    seen: set[str] = set()
    above: Node | None = parent
    while above is not None and above.span.span_id not in seen:
        if above is node:
            return True
        seen.add(above.span.span_id)
        above = nodes.get(above.span.parent_id)
    return False


def label(span: Span) -> str:
    """Return the name of a span with its most important attributes."""
    facts = span.attributes
    words = [str(facts[name]) for name in _SHOWN.get(span.name, ("asel.op", "asel.config")) if facts.get(name)]
    if facts.get("asel.winner"):
        words.append("winner")
    if facts.get("asel.failed") or span.failed:
        words.append(f"failed: {facts.get('error.type', 'error')}")
    if span.links:
        words.append(f"waits for the tune in {span.links[0][0][:8]}" if facts.get("asel.wait_s") else "linked")
    return redact(" ".join([span.name, *words]))


_SHOWN = {
    "asel.choose": ("asel.op", "asel.tier"),
    "asel.autotune": ("asel.op", "asel.call"),
    "asel.candidate": ("asel.config",),
    "asel.candidate.compile": (),
    "asel.candidate.measure": (),
}


def print_trace(out: Console, trace: Trace) -> None:
    """Print a trace: a line for each span, as wide as the terminal."""
    from rich.text import Text

    from asel.cli.output import bar
    from asel.tuning.outcomes import in_words

    width = out.width if out.is_terminal else _UNBOUNDED_WIDTH
    rows = [(f"{'  ' * depth}{label(node.span)}", node.span) for root in trace.roots for depth, node in root.walk()]
    longest = max(len(text) for text, _ in rows)
    room = min(longest, max(12, (width - _DURATION - 2) * 3 // 5))
    bar_room = max(_MIN_BAR, width - room - _DURATION - 3)
    whole_s, start_ns = trace.seconds, trace.start_ns
    service = next((span.service for span in trace.spans if span.service), "")
    out.print(Text(f"trace {trace.trace_id}  {in_words(whole_s)}  {redact(service)}".rstrip(), "bold"), soft_wrap=True)
    for text, span in rows:
        before = (span.start_ns - start_ns) / 1e9 / whole_s if whole_s else 0.0
        share = span.seconds / whole_s if whole_s else 0.0
        at = min(bar_room - 1, int(before * bar_room))
        drawn = bar(1.0, min(max(1, round(share * bar_room)), bar_room - at), out)
        shown = text if len(text) <= room else f"{text[: room - 3]}..."
        line = Text.assemble(f"{shown:<{room}} ", (f"{in_words(span.seconds):>{_DURATION}} ", "bold"), " " * at)
        line.append(drawn, _colour(span))
        out.print(line, soft_wrap=True)


def _colour(span: Span) -> str:
    if span.failed:
        return "red"
    if span.attributes.get("asel.failed"):  # a failed candidate is not an error of its tune
        return "yellow"
    return "green" if span.attributes.get("asel.winner") else "cyan"
