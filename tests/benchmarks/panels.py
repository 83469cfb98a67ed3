"""Whether every panel and every alert shows what a real run does: `python tests/benchmarks/panels.py`.

Needs Debian's `prometheus` on PATH. It scrapes `tests/support/busy_service.py`, in which everything happens that
the dashboard shows, and loads the rules that are checked in. Panels are asked as Grafana asks them, over the time of
the run. All on loopback. Jaeger is not there: where a panel's link would lead is looked up among the spans of the
run. Exits with 1 if
a query returns nothing, nothing above zero or no number, if a link leads to no span, if a rule fails, or if an alert
stays silent.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any
from urllib.error import URLError
from urllib.parse import parse_qs, urlencode, urlparse
from urllib.request import urlopen

import anyio
import yaml
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from prometheus_client import start_http_server
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own helpers

from support.busy_service import set_up, work
from support.redis_server import free_port

FOLDER = Path(__file__).parents[2] / "observability"
BOARD = json.loads((FOLDER / "grafana/dashboards/asel.json").read_text())
PATIENCE_S = 20.0
INTERVAL_S = 0.25
Findable = tuple[str, dict[str, str]]
"""A span's name and tags."""
SERVICE = "busy"
# What becomes of each alert in a run of seconds: those that have to last for minutes get as far as pending.
EXPECTED = {
    "AselHitRatioCollapsed": "pending",
    "AselTuneStuck": "pending",
    "AselTunesFailing": "firing",
    "AselFallbackSurge": "pending",
    "AselStoreDown": "pending",
    "AselTelemetryShedding": "pending",
    "AselCollectorDown": "pending",
}


@contextmanager
def running_prometheus(program: str, exporter: int) -> Iterator[str]:
    """Start Prometheus with the configuration as it is, but for addresses and pace; yield where to ask it.

    The collector is not there, and an alert should say so.
    """
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yaml").read_text())
    pace = f"{round(INTERVAL_S * 1000)}ms"
    config["global"] = {"scrape_interval": pace, "evaluation_interval": pace}
    config["rule_files"] = [str(FOLDER / "prometheus" / name) for name in config["rule_files"]]
    addresses = {"asel": f"127.0.0.1:{exporter}", "collector": f"127.0.0.1:{free_port()}"}
    for scrape in config["scrape_configs"]:
        scrape["static_configs"] = [{"targets": [addresses[scrape["job_name"]]]}]
        if scrape["job_name"] == "asel":
            scrape["static_configs"][0]["labels"] = {"job": SERVICE}  # which the collector takes from service.name
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prometheus.yaml").write_text(yaml.safe_dump(config))
        options = [
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
        process = subprocess.Popen([program, *options])
        try:
            yield f"http://{address}/api/v1"
        finally:
            process.kill()
            process.wait()


def ask(api: str, what: str, **parameters: Any) -> Any:
    with urlopen(f"{api}/{what}?{urlencode(parameters)}", timeout=5) as answer:
        return json.load(answer)["data"]


def until(done: Any) -> None:
    """Wait until `done` says so, or patience ends."""
    end = monotonic() + PATIENCE_S
    while monotonic() < end:
        try:
            if done():
                return
        except URLError:
            pass  # it is still starting
        sleep(INTERVAL_S)


def history(api: str, expr: str, start: float) -> list[tuple[dict[str, str], list[float]]]:
    """Return each series of `expr` since `start`: its labels and values."""
    found = ask(api, "query_range", query=expr, start=start, end=time(), step=INTERVAL_S)["result"]
    return [(series["metric"], [float(value) for _, value in series["values"]]) for series in found]


def queries() -> Iterator[tuple[dict[str, Any], str, str]]:
    """Give each query of the dashboard as Grafana sends it: its panel, its legend, PromQL."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel, target["legendFormat"], target["expr"].replace("$service", SERVICE).replace("$op", ".*")


def what_is_wrong(values: list[float]) -> Iterator[str]:
    """Say why a graph of these values would show nothing of the run."""
    if not values:
        yield "empty"
    elif not all(map(math.isfinite, values)):
        yield "not a number"
    elif max(values) <= 0:
        yield "never above zero"


def dead_links(panel: dict[str, Any], labels: dict[str, str], spans: list[Findable]) -> Iterator[str]:
    """Name the panel's links that lead nowhere when a point of the series with `labels` is clicked."""
    for link in panel["fieldConfig"]["defaults"].get("links", []):
        url = re.sub(r"\$\{__field\.labels\.(\w+)\}", lambda label: labels[label[1]], link["url"])
        asked = parse_qs(urlparse(url).query)
        tags = json.loads(asked["tags"][0])
        if not any(name == asked["operation"][0] and tags.items() <= has.items() for name, has in spans):
            yield f"no span behind {link['title']!r}: {asked['operation'][0]} {tags}"


def findable(span: ReadableSpan) -> Findable:
    """Return what Jaeger finds a span by: its attributes as text, and `error` where its status says so."""
    tags = {name: "true" if value is True else str(value) for name, value in (span.attributes or {}).items()}
    return span.name, tags | ({"error": "true"} if span.status.status_code is StatusCode.ERROR else {})


def panels(api: str, start: float, spans: list[Findable]) -> tuple[Table, list[str]]:
    table = Table("panel", "query", "series", "lowest", "highest", "", box=SIMPLE, title="What the dashboard shows")
    failures = []
    for panel, legend, expr in queries():
        found = history(api, expr, start)
        values = [value for _, series in found for value in series]
        shown = [labels for labels, series in found if max(series) > 0]
        wrong = [*what_is_wrong(values), *(dead for labels in shown for dead in dead_links(panel, labels, spans))]
        ends = (f"{min(values):.3g}", f"{max(values):.3g}") if values else ("", "")
        table.add_row(panel["title"], legend, str(len(found)), *ends, "wrong" if wrong else "ok")
        failures += [f"{panel['title']}: {each}: {expr}" for each in wrong]
    return table, failures


def alerts(api: str, start: float) -> tuple[Table, list[str]]:
    table = Table("alert", "for", "seen", "expected", "of", box=SIMPLE, title="What the alerts said")
    rules = [rule for group in ask(api, "rules")["groups"] for rule in group["rules"]]
    failures = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
    for rule in (rule for rule in rules if rule["type"] == "alerting"):
        said = [labels for labels, _ in history(api, f'ALERTS{{alertname="{rule["name"]}"}}', start)]
        states = {labels["alertstate"] for labels in said}
        expected = EXPECTED.get(rule["name"], "an expectation")
        whose = {labels.get("asel_op") or labels.get("asel_operation") or labels.get("reason", "") for labels in said}
        lasting = f"{rule['duration']:g} s"
        table.add_row(rule["name"], lasting, ", ".join(sorted(states)), expected, ", ".join(sorted(whose)))
        failures += [] if expected in states else [f"{rule['name']}: not {expected}"]
    table.caption = f"{len(rules)} rules, {sum(rule['health'] == 'ok' for rule in rules)} of them evaluated well"
    return table, failures


def main() -> int:
    program = shutil.which("prometheus")
    if program is None:
        sys.exit("no prometheus on PATH: apt-get install prometheus")
    (registry, exported), exporter = set_up(), free_port()
    server, _ = start_http_server(exporter, addr="127.0.0.1", registry=registry)
    with running_prometheus(program, exporter) as api:
        until(lambda: ask(api, "query", query=f'up{{job="{SERVICE}"}}')["result"])
        start = time()
        anyio.run(work)
        # Ratios are recorded from records, and alerts come of those: some evaluations, and all is told.
        spans = [findable(span) for span in exported.get_finished_spans()]
        until(lambda: not panels(api, start, spans)[1] + alerts(api, start)[1])
        (board, unseen), (said, unsaid) = panels(api, start, spans), alerts(api, start)
    server.shutdown()
    Console(width=120).print(board, said)
    print("\n".join([*unseen, *unsaid]) or f"every panel and every alert shows the run of {time() - start:.1f} s")
    return bool(unseen + unsaid)


if __name__ == "__main__":
    sys.exit(main())
