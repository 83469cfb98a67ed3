"""Whether every panel of the dashboard returns data from a real Prometheus: `python tests/benchmarks/panels.py`.

Needs Debian's `prometheus` and PyPI's `opentelemetry-exporter-prometheus`. Every metric of `names.py` is recorded
through OpenTelemetry's SDK with its instrument and unit, so the names Prometheus sees are OpenTelemetry's, not ours.
Prometheus loads the rules that are checked in. All on loopback. Exits with 1 if a panel stays empty or a rule fails.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from asel.telemetry.names import DURATION_BUCKETS_S, INSTRUMENTS, METRICS

FOLDER = Path(__file__).parents[2] / "observability"
PATIENCE_S = 60.0
SERVICE = "panels"

# For each label the values a busy service would have; None: the label is absent.
VALUES: dict[str, tuple[str | None, ...]] = {
    "asel.op": ("demo.matmul@v1", "demo.attention@v2"),
    "asel.tier": ("memory", "persistent", "autotune", "heuristics", "error"),
    "asel.device.kind": ("cpu",),
    "asel.stage": ("compile", "measure"),
    "asel.operation": ("get", "put", "claim"),
    "error.type": (None, "TimeoutError"),
    "reason": ("rate",),
}


def record_everything() -> None:
    meter = MeterProvider([PrometheusMetricReader()]).get_meter("asel")
    for metric, labels in METRICS.items():
        kind, unit = INSTRUMENTS[metric]
        for values in product(*(VALUES[label] for label in labels)):
            attributes = {label: value for label, value in zip(labels, values, strict=True) if value is not None}
            match kind:
                case "counter":
                    meter.create_counter(metric, unit).add(10, attributes)
                case "updowncounter":
                    meter.create_up_down_counter(metric, unit).add(2, attributes)
                case "histogram":
                    histogram = meter.create_histogram(
                        metric, unit, explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S
                    )
                    for seconds in (2e-6, 0.03, 4.0):
                        histogram.record(seconds, attributes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def running_prometheus(exporter: int) -> Iterator[str]:
    """Start Prometheus with the rules as they are, scraping and evaluating every second; yield its address."""
    program = shutil.which("prometheus")
    if program is None:
        sys.exit("no prometheus on PATH: apt-get install prometheus")
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "prometheus/rules.yaml")]
    config["scrape_configs"] = [{"job_name": SERVICE, "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}]
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prometheus.yaml").write_text(yaml.safe_dump(config))
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
                "--log.level=error",
            ]
        )
        try:
            yield f"http://{address}/api/v1"
        finally:
            process.terminate()
            process.wait(10)


def ask(api: str, what: str, **parameters: str) -> Any:
    with urlopen(f"{api}/{what}?{urlencode(parameters)}", timeout=5) as answer:
        return json.load(answer)["data"]


def until(found: Any) -> Any:
    """Return the first truthy answer of `found`, or the last one when patience ends."""
    end = monotonic() + PATIENCE_S
    while True:
        try:
            answer = found()
        except URLError:
            answer = None
        if answer or monotonic() > end:
            return answer
        sleep(0.5)


def series(api: str, expr: str) -> list[float]:
    """Return the values `expr` has now, without those that are no number."""
    values = [float(each["value"][1]) for each in ask(api, "query", query=expr)["result"]]
    return [value for value in values if not math.isnan(value)]


def main() -> int:
    record_everything()
    exporter = free_port()
    start_http_server(exporter, addr="127.0.0.1")
    board = json.loads((FOLDER / "grafana/dashboards/asel.json").read_text())
    table = Table("panel", "query", "series", "from", "to", box=SIMPLE, title="What each panel returns")
    failures = []
    with running_prometheus(exporter) as api:
        # Ratios are recorded from records: three evaluations and all have their first value.
        until(lambda: series(api, "asel:hit_ratio:increase5m") and series(api, "asel:store_error_ratio:increase10m"))
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                expr = target["expr"].replace("$service", SERVICE).replace("$op", ".*")
                values = series(api, expr)
                if not values:
                    failures.append(f"{panel['title']}: no data from {expr}")
                ends = (f"{min(values):.3g}", f"{max(values):.3g}") if values else ("", "")
                table.add_row(panel["title"], target["legendFormat"], str(len(values)), *ends)
        rules = [rule for group in ask(api, "rules")["groups"] for rule in group["rules"]]
        failures += [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
    Console(width=120).print(table)
    print(f"{len(rules)} rules evaluated by Prometheus, {sum(rule['health'] == 'ok' for rule in rules)} of them well")
    for failure in failures:
        print(failure)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
