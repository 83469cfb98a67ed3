"""Writes asel's Grafana dashboard: `python observability/grafana/dashboard.py`.

The JSON beside it is checked in, and a test holds that it is what this file makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import quote

from grafana_foundation_sdk.builders import common as layout
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

WRITTEN_TO = Path(__file__).parent / "dashboards" / "asel.json"
PROMETHEUS = dashboard.DataSourceRef(type_val="prometheus", uid="asel-prometheus")
JAEGER_UI = "http://127.0.0.1:16686"

OP = 'job="$service",asel_op=~"$op"'
SERVICE = 'job="$service"'

# What the point that was clicked belongs to.
THIS_OP = "${__field.labels.asel_op}"
THIS_TIER = "${__field.labels.asel_tier}"
THIS_ERROR = "${__field.labels.error_type}"
THIS_OPERATION = "${__field.labels.asel_operation}"


def grown(series: str, window: str) -> str:
    """Return PromQL for how much each of `series` grew within `window`, its first value included.

    `increase` alone sees nothing of a counter that was 1 when it was first scraped, and most of what a tune counts
    is like that. The last value counts, not the current one: a scrape that failed takes nothing back. The rules in
    `rules.yaml` do the same.
    """
    new = f"last_over_time({series}[{window}]) unless last_over_time({series}[1h] offset {window})"
    return f"(({new}) or increase({series}[{window}]))"


def quantile(q: float, metric: str, selector: str, by: str, window: str) -> str:
    return f"histogram_quantile({q}, sum by (le, {by}) ({grown(f'{metric}_bucket{{{selector}}}', window)}))"


def in_jaeger(title: str, operation: str, tags: dict[str, str]) -> boards.DashboardLink:
    """Return a link to the spans of `operation` that carry `tags`, within the dashboard's time range.

    A tag's value may be one of Grafana's variables: those stay as they are in the address.
    """
    encoded = re.sub(r"%24%7B(.+?)%7D", r"${\1}", quote(json.dumps(tags, separators=(",", ":"))))
    times = "start=${__from}000&end=${__to}000&lookback=custom&limit=50"
    url = f"{JAEGER_UI}/search?service=${{service}}&operation={operation}&tags={encoded}&{times}"
    return boards.DashboardLink(title).type(dashboard.DashboardLinkType.LINK).url(url).target_blank(True)


def panel(
    title: str,
    description: str,
    unit: str,
    targets: dict[str, str],
    *,
    links: list[boards.DashboardLink] | None = None,
    width: int = 8,
    stacked: bool = False,
    logarithmic: bool = False,
) -> timeseries.Panel:
    """Return a graph of `targets`, PromQL by legend; those of histograms show exemplars that lead to their traces."""
    built = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .min(0)
        .datasource(PROMETHEUS)
        .grid_pos(dashboard.GridPos(h=8, w=width, x=0, y=0))
        .legend(
            layout.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(layout.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .fill_opacity(20 if stacked else 0)
        .show_points(common.VisibilityMode.AUTO)
        .data_links(links or [])
    )
    if stacked:
        built.stacking(layout.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if logarithmic:
        built.scale_distribution(layout.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    for ref, (legend, expr) in zip("ABCDEF", targets.items(), strict=False):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(PROMETHEUS)
        built.with_target(query.range().exemplar("_bucket{" in expr))
    return built


def variables() -> list[boards.QueryVariable]:
    service = (
        boards.QueryVariable("service")
        .label("Service")
        .query("label_values(asel_selections_total, job)")
        .datasource(PROMETHEUS)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    op = (
        boards.QueryVariable("op")
        .label("Op")
        .query('label_values(asel_selections_total{job="$service"}, asel_op)')
        .datasource(PROMETHEUS)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
    )
    return [service, op]


def answers() -> list[timeseries.Panel]:
    by_tier = in_jaeger("Requests of this tier in Jaeger", "asel.choose", {"asel.tier": THIS_TIER})
    by_op = in_jaeger("Requests of this op in Jaeger", "asel.choose", {"asel.op": THIS_OP})
    guesses = in_jaeger(
        "Requests that ran on a guess in Jaeger", "asel.choose", {"asel.op": THIS_OP, "asel.tier": "heuristics"}
    )
    # Without error=true: a caller that leaves does not mark its span as an error.
    errors = in_jaeger("Requests that raised in Jaeger", "asel.choose", {"error.type": THIS_ERROR})
    return [
        panel(
            "Selections by tier",
            "Answers a second, by the tier that gave them. Healthy: almost all memory.",
            "ops",
            {"{{asel_tier}}": f"sum by (asel_tier) (asel:selections:increase5m{{{OP}}}) / 300"},
            links=[by_tier],
            stacked=True,
        ),
        panel(
            "Hit ratio",
            "Of the requests that reached the caches, the share that memory or the store answered.",
            "percentunit",
            {"{{asel_op}}": f"asel:hit_ratio:increase5m{{{OP}}}"},
            links=[by_op],
        ),
        panel(
            "Heuristic fallbacks",
            "Answers a second that were the kernel's guess. In the span, asel.declined says why.",
            "ops",
            {"{{asel_op}}": f'sum by (asel_op) (asel:selections:increase5m{{{OP},asel_tier="heuristics"}}) / 300'},
            links=[guesses],
        ),
        panel(
            "Choose p50 and p99 by tier",
            "How long callers took to get a config. Each diamond is one request: click it for its trace.",
            "s",
            {
                f"p{round(q * 100)} {{{{asel_tier}}}}": quantile(
                    q, "asel_choose_duration_seconds", OP, "asel_tier", "5m"
                )
                for q in (0.5, 0.99)
            },
            links=[by_tier],
            width=16,
            logarithmic=True,
        ),
        panel(
            "Requests that raised, by type",
            "In five minutes. NoConfigError: every tier declined. cancelled: the caller left before its answer.",
            "short",
            {
                "{{error_type}}": "sum by (error_type) ("
                + grown(f'asel_choose_duration_seconds_count{{{OP},error_type!=""}}', "5m")
                + ")"
            },
            links=[errors],
        ),
    ]


def tunes() -> list[timeseries.Panel]:
    of_op = in_jaeger("Tunes of this op in Jaeger", "asel.autotune", {"asel.op": THIS_OP})
    waiters = in_jaeger("Who waited or tuned, in Jaeger", "asel.choose", {"asel.op": THIS_OP, "asel.tier": "autotune"})
    failed = in_jaeger(
        "Failed candidates in Jaeger", "asel.candidate", {"asel.failed": "true", "error.type": THIS_ERROR}
    )
    failed_tunes = in_jaeger("Failed tunes in Jaeger", "asel.autotune", {"asel.op": THIS_OP, "error.type": THIS_ERROR})
    return [
        panel(
            "Tunes in flight",
            "Tunes that have begun and not ended.",
            "short",
            {"{{asel_op}}": f"sum by (asel_op) (asel_tunes_pending{{{OP}}})"},
            links=[of_op],
        ),
        panel(
            "Tune p50 and p95",
            "How long the tunes of the last 15 minutes took. Each diamond is one tune: click it for its trace.",
            "s",
            {
                f"p{round(q * 100)} {{{{asel_op}}}}": quantile(q, "asel_tune_duration_seconds", OP, "asel_op", "15m")
                for q in (0.5, 0.95)
            },
            links=[of_op],
            logarithmic=True,
        ),
        panel(
            "Time spent tuning, by op",
            "Seconds of tuning in 15 minutes. Above 900, one process tunes all the time, or several tune at once.",
            "s",
            {"{{asel_op}}": "sum by (asel_op) (" + grown(f"asel_tune_duration_seconds_sum{{{OP}}}", "15m") + ")"},
            links=[of_op],
            stacked=True,
        ),
        panel(
            "Waiters",
            "Callers waiting for a tune now.",
            "short",
            {"{{asel_op}}": f"sum by (asel_op) (asel_waiters{{{OP}}})"},
            links=[waiters],
        ),
        panel(
            "Wait p50 and p99",
            "How long callers waited for a tune, in the last 15 minutes.",
            "s",
            {
                f"p{round(q * 100)} {{{{asel_op}}}}": quantile(q, "asel_wait_duration_seconds", OP, "asel_op", "15m")
                for q in (0.5, 0.99)
            },
            links=[waiters],
            logarithmic=True,
        ),
        panel(
            "Background queue",
            "Requests for a tune that no tune has taken up yet.",
            "short",
            {"queued": f"sum (asel_background_queue{{{SERVICE}}})"},
        ),
        panel(
            "Candidate failures by type",
            "In 15 minutes, by what went wrong and where. One failing candidate is data; in run, it was a winner.",
            "short",
            {
                "{{error_type}} in {{asel_stage}}": (
                    f"sum by (error_type, asel_stage) (asel:candidate_failures:increase15m{{{OP}}})"
                )
            },
            links=[failed],
        ),
        panel(
            "Tune failures by type",
            "In 15 minutes: tunes in which every candidate failed, or that were ended from outside.",
            "short",
            {"{{asel_op}} {{error_type}}": f"sum by (asel_op, error_type) (asel:tune_failures:increase15m{{{OP}}})"},
            links=[failed_tunes],
        ),
        panel(
            "Candidates' time by stage",
            "Seconds in 15 minutes that candidates spent compiling and being measured.",
            "s",
            {
                "{{asel_stage}}": "sum by (asel_stage) ("
                + grown(f"asel_candidate_duration_seconds_sum{{{OP}}}", "15m")
                + ")"
            },
            stacked=True,
        ),
    ]


def surroundings() -> list[timeseries.Panel]:
    failed = in_jaeger(
        "What failed in Jaeger", f"asel.store.{THIS_OPERATION}", {"error": "true", "error.type": THIS_ERROR}
    )
    return [
        panel(
            "Store errors",
            "Failed operations in 10 minutes. asel goes on without its store.",
            "short",
            {
                "{{asel_operation}} {{error_type}}": (
                    "sum by (asel_operation, error_type) "
                    f'(asel:store_operations:increase10m{{{SERVICE},error_type!=""}})'
                )
            },
            links=[failed],
        ),
        panel(
            "Store p50 and p99 by operation",
            "How long the store took, in the last 15 minutes.",
            "s",
            {
                f"p{round(q * 100)} {{{{asel_operation}}}}": quantile(
                    q, "asel_store_duration_seconds", SERVICE, "asel_operation", "15m"
                )
                for q in (0.5, 0.99)
            },
            logarithmic=True,
        ),
        panel(
            "Telemetry and what was dropped",
            "Events in 5 minutes, and what was dropped: events that were never recorded, spans (traces) and log records"
            " (logs) that were never sent. Hits are dropped first, tunes and errors last.",
            "short",
            {
                "events": f"sum ({grown(f'asel_telemetry_events_total{{{SERVICE}}}', '5m')})",
                "dropped {{asel_signal}}: {{asel_reason}}": (
                    f"sum by (asel_signal, asel_reason) (asel:telemetry_dropped:increase5m{{{SERVICE}}})"
                ),
            },
        ),
    ]


def asel() -> boards.Dashboard:
    board = (
        boards.Dashboard("asel")
        .uid("asel")
        .description("Which configs kernels got, from where, and what finding them cost.")
        .tags(["asel"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(
            boards.DashboardLink("Jaeger")
            .type(dashboard.DashboardLinkType.LINK)
            .url(f"{JAEGER_UI}/search?service=${{service}}&operation=asel.autotune")
            .target_blank(True)
        )
    )
    for variable in variables():
        board.with_variable(variable)
    for title, panels in (
        ("Answers", answers()),
        ("Tunes", tunes()),
        ("Store and telemetry", surroundings()),
    ):
        board.with_row(boards.Row(title))
        for each in panels:
            board.with_panel(each)
    return board


def written() -> str:
    return json.dumps(asel().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    WRITTEN_TO.write_text(written())
