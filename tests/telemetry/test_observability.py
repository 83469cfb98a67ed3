"""The configuration in observability/ agrees with the code: names, wiring, rules, dashboard."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from typing import Any
from urllib.parse import parse_qs, urlparse

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.paths import ROOT, TESTS

from asel import events
from asel.telemetry.names import ATTRIBUTES, INSTRUMENTS, METRICS, SPANS

FOLDER = ROOT / "observability"
PROMTOOL = shutil.which("promtool")
PROMETHEUS_PROGRAM = shutil.which("prometheus")

UNIT_SUFFIXES = {"s": "seconds"}
# What the label asel.operation says.
OPERATIONS = ("get", "put", "claim")
# Every scraped series has these; the collector makes them of service.name and service.instance.id.
TARGET_LABELS = frozenset({"job", "instance"})
# Prometheus' own series.
OWN = {"up": TARGET_LABELS}


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


COMPOSE = load("compose.yaml")
COLLECTOR = load("collector/config.yaml")
JAEGER = load("jaeger/config.yaml")
PROMETHEUS = load("prometheus/prometheus.yaml")
RULES = [rule for group in load("prometheus/rules.yaml")["groups"] for rule in group["rules"]]
RULE_TESTS = load("prometheus/rules_test.yaml")
DATASOURCES = load("grafana/provisioning/datasources/datasources.yaml")["datasources"]
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/asel.json").read_text())
README = (FOLDER / "README.md").read_text()

RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}


def without_variables(expr: str) -> str:
    return expr.replace("$service", "demo").replace("$op", ".*")


EXPRESSIONS = {f"rule {rule.get('record') or rule['alert']}": rule["expr"] for rule in RULES} | {
    f"panel {title}: {target['legendFormat']}": without_variables(target["expr"])
    for title, panel in PANELS.items()
    for target in panel["targets"]
}


def prometheus_label(name: str) -> str:
    return name.replace(".", "_")


def prometheus_series(metric: str) -> dict[str, frozenset[str]]:
    """Return what the collector's Prometheus exporter makes of `metric`: each series' name and labels.

    With `UnderscoreEscapingWithSuffixes`: dots to underscores, then the unit, then what the kind adds. A unit in
    braces is an annotation and leaves no suffix.
    """
    kind, unit = INSTRUMENTS[metric]
    name = metric.replace(".", "_")
    if not re.fullmatch(r"\{\w+\}", unit):
        name += f"_{UNIT_SUFFIXES[unit]}"
    labels = TARGET_LABELS | {prometheus_label(label) for label in METRICS[metric]}
    match kind:
        case "counter":
            return {f"{name}_total": labels}
        case "updowncounter":
            return {name: labels}
        case "histogram":
            return {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}


SERIES = {name: labels for metric in METRICS for name, labels in prometheus_series(metric).items()}


def labels_of(expr: Any) -> frozenset[str]:
    """Return the labels that the result of `expr` can have, having checked each name within.

    Raises:
        AssertionError: a series or a label is not one of asel's.
    """
    match expr:
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels_of(expr.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case promql.SubqueryExpr():
            return labels_of(expr.expr)
        case promql.MatrixSelector():
            return labels_of(expr.vector_selector)
        case promql.VectorSelector():
            if expr.name in RECORDS:
                labels = labels_of(promql.parse(RECORDS[expr.name]["expr"]))
            else:
                known = SERIES | OWN
                assert expr.name in known, f"{expr.name} is not a series of asel's"
                labels = known[expr.name]
            matched = {matcher.name for matcher in expr.matchers.matchers}
            assert matched <= labels, f"{expr.name} has no label {matched - labels}"
            return labels
        case promql.AggregateExpr():
            inner = labels_of(expr.expr)
            if expr.modifier is None:
                return frozenset()
            assert expr.modifier.type == promql.AggModifierType.By, "say what is kept, not what is left out"
            kept = frozenset(expr.modifier.labels)
            assert kept <= inner, f"{kept - inner} is not there to aggregate by"
            return kept
        case promql.Call():
            of_arguments = [labels_of(argument) for argument in expr.args]
            labels = frozenset().union(*of_arguments)
            if expr.func.name == "histogram_quantile":
                assert "le" in labels, "a quantile needs its buckets"
                return labels - {"le"}
            return labels
        case promql.BinaryExpr():
            left, right = labels_of(expr.lhs), labels_of(expr.rhs)
            if left and right:
                # Without on() or ignoring(), two vectors match where all their labels do.
                assert expr.modifier is None or expr.modifier.matching is None
                assert left == right, f"{sorted(left)} never matches {sorted(right)}"
            return left or right
    raise AssertionError(f"{type(expr).__name__} is new here")


def test_every_metric_has_an_instrument_and_a_unit():
    """Prometheus' names are derived from them."""
    assert list(INSTRUMENTS) == list(METRICS)
    for metric, (kind, unit) in INSTRUMENTS.items():
        assert metric.endswith(".duration") == (kind == "histogram") == (unit == "s")


def test_the_collector_names_series_as_the_dashboard_does():
    """The collector's configuration adds kind and unit to the name."""
    assert prometheus_series("asel.selections") == {
        "asel_selections_total": {"job", "instance", "asel_op", "asel_tier"}
    }
    assert list(prometheus_series("asel.choose.duration")) == [
        "asel_choose_duration_seconds_bucket",
        "asel_choose_duration_seconds_sum",
        "asel_choose_duration_seconds_count",
    ]
    assert list(prometheus_series("asel.tunes.pending")) == ["asel_tunes_pending"]
    exporter = COLLECTOR["exporters"]["prometheus"]
    assert exporter["translation_strategy"] == "UnderscoreEscapingWithSuffixes"
    assert "namespace" not in exporter
    (scrape,) = [job for job in PROMETHEUS["scrape_configs"] if job["job_name"] == "asel"]
    assert scrape["honor_labels"], "job and instance are the service's"


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_uses_only_names_that_exist(expr):
    """It parses, and asel emits, or a rule records, every series, label and grouping in it."""
    labels_of(promql.parse(expr))


@pytest.mark.parametrize(
    "wrong",
    [
        "asel_selections",
        "asel_selection_total",
        "asel_choose_duration_bucket",
        'asel_selections_total{asel_key="x"}',
        "sum by (asel_tier) (asel_waiters)",
        "sum by (le) (asel_choose_duration_seconds_count)",
        "histogram_quantile(0.5, sum by (asel_op) (asel_tune_duration_seconds_bucket))",
        "asel:hit_ratio:increase5m < 0.5 and asel:selections:increase5m > 0",
        "sum without (job) (asel_waiters)",
    ],
)
def test_a_wrong_name_is_found(wrong):
    """The check above can fail."""
    with pytest.raises(AssertionError):
        labels_of(promql.parse(wrong))


@pytest.mark.timeout(60)  # another process loads JAX and tunes
def test_a_real_run_has_exactly_these_series():
    """The names and labels that asel's sinks send through the SDK are those documented here."""
    command = [sys.executable, "-m", "support.busy_service"]
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(
        subprocess.run(command, cwd=TESTS, capture_output=True, check=True).stdout.decode()
    ):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    del found["target_info"]  # the SDK's own
    assert found == {name: labels - TARGET_LABELS for name, labels in SERIES.items()}


def test_every_metric_is_used():
    """By a panel or a rule."""
    used = "\n".join(EXPRESSIONS.values())
    for metric in METRICS:
        assert any(series in used for series in prometheus_series(metric)), metric
    for record in RECORDS:
        assert sum(record in expr for expr in EXPRESSIONS.values()), record


@pytest.mark.parametrize("title", PANELS)
def test_a_panel_has_a_description_and_working_links(title):
    """Legends and links use labels of their query; links lead to existing spans and tags."""
    panel = PANELS[title]
    assert panel["description"]
    returned = []
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "asel-prometheus"
        labels = labels_of(promql.parse(without_variables(target["expr"])))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
        assert target["exemplar"] == ("_bucket{" in target["expr"]), "durations lead to traces"
        returned.append(labels)
    for link in panel["fieldConfig"]["defaults"].get("links", []):
        url = urlparse(re.sub(r"\$\{(.+?)\}", r"<\1>", link["url"]))
        query = parse_qs(url.query, strict_parsing=True)
        assert url.netloc == "127.0.0.1:16686"
        assert query["service"] == ["<service>"]
        operation = query["operation"][0]
        assert {operation.replace("<__field.labels.asel_operation>", each) for each in OPERATIONS} <= set(SPANS)
        tags = json.loads(query["tags"][0])
        assert set(tags) <= {*ATTRIBUTES, "error"}, "Jaeger itself sets error=true on a span whose status is ERROR"
        for label in re.findall(r"__field\.labels\.(\w+)", link["url"]):
            assert all(label in labels for labels in returned)


def test_every_question_has_a_panel():
    """Selections, hits, latencies, tunes, waiters, failures, cost, fallbacks, store, shedding; links to traces."""
    assert list(PANELS) == [
        "Selections by tier",
        "Hit ratio",
        "Heuristic fallbacks",
        "Choose p50 and p99 by tier",
        "Requests that raised, by type",
        "Tunes in flight",
        "Tune p50 and p95",
        "Time spent tuning, by op",
        "Waiters",
        "Wait p50 and p99",
        "Background queue",
        "Candidate failures by type",
        "Tune failures by type",
        "Candidates' time by stage",
        "Store errors",
        "Store p50 and p99 by operation",
        "Telemetry and what was dropped",
    ]


def test_the_variables_use_series_and_labels_that_exist():
    """`label_values(series, label)`, for a series and a label of asel's."""
    for variable in DASHBOARD["templating"]["list"]:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()
        assert label in labels_of(promql.parse(without_variables(selector)))
        assert variable["datasource"]["uid"] == "asel-prometheus"


def test_the_dashboard_matches_its_script():
    """Grafana reads the JSON; its source is the script."""
    made = runpy.run_path(str(FOLDER / "grafana/dashboard.py"))["written"]()
    assert made == (FOLDER / "grafana/dashboards/asel.json").read_text(), "run observability/grafana/dashboard.py"


def test_the_sampler_keeps_errors_tunes_and_waiters():
    """Its conditions use attributes that asel sets."""
    policies = {policy["name"]: policy for policy in COLLECTOR["processors"]["tail_sampling"]["policies"]}
    assert list(policies) == ["errors", "tunes", "waiters", "a-share-of-hits"]
    assert policies["errors"]["status_code"]["status_codes"] == ["ERROR"]
    assert 0 < policies["a-share-of-hits"]["probabilistic"]["sampling_percentage"] <= 10
    conditions = [
        condition for policy in policies.values() for condition in policy.get("ottl_condition", {}).get("span", [])
    ]
    assert 'name == "asel.autotune"' in conditions
    for condition in conditions:
        names, attributes = re.findall(r'^name == "(.+?)"$', condition), re.findall(r'attributes\["(.+?)"\]', condition)
        assert len(names + attributes) == 1
        assert set(names) <= set(SPANS)
        assert set(attributes) <= set(ATTRIBUTES)


def test_the_sampling_decision_waits_for_the_longest_tune():
    """A tune's span ends up to `tune_budget_s` after its first candidate's."""
    from asel import AutotunePolicy

    wait_s = float(COLLECTOR["processors"]["tail_sampling"]["decision_wait"].removesuffix("s"))
    assert wait_s > AutotunePolicy().tune_budget_s


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "collector/config.yaml",
        "jaeger/config.yaml",
        "prometheus/rules.yaml",
        "grafana/dashboards/asel.json",
    ],
)
def test_prose_uses_only_names_that_exist(name):
    """Each `asel.something` in configuration and instructions is a span, an attribute, a metric or a log's event."""
    logged = {
        f"asel.{kind.name}" for kind in vars(events).values() if hasattr(kind, "name") and kind is not events.Event
    }
    labels = {label for labels in METRICS.values() for label in labels}
    known = {*SPANS, *ATTRIBUTES, *METRICS, *labels, *logged, "asel.json"}
    text = (FOLDER / name).read_text().replace("${__field.labels.asel_operation}", OPERATIONS[0])
    text = re.sub(r"\$\{__field\.labels\.\w+\}", "", text)
    assert set(re.findall(r"(?<![\w/])asel\.[a-z_]+(?:\.[a-z_]+)*", text)) <= known


@pytest.mark.parametrize("config", [COLLECTOR, JAEGER], ids=["collector", "jaeger"])
def test_pipelines_use_exactly_the_defined_components(config):
    """A component that is used and not defined stops the collector; a component that is not used does nothing."""
    pipelines = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines for name in pipeline.get(kind, [])}
        assert used == set(config[kind])
    assert set(config["service"]["extensions"]) == set(config["extensions"])


def test_the_collector_limits_memory_first_and_batches_last():
    """Data must be refused before it is kept, and sampled before it is batched."""
    pipelines = COLLECTOR["service"]["pipelines"]
    assert pipelines["traces"]["processors"] == ["memory_limiter", "tail_sampling", "batch"]
    assert pipelines["metrics"]["processors"] == pipelines["logs"]["processors"] == ["memory_limiter", "batch"]


def test_the_collector_accepts_every_signal_that_asel_sends():
    """A receiver without a pipeline for a signal answers 404."""
    for pipeline in ("traces", "metrics", "logs"):
        assert COLLECTOR["service"]["pipelines"][pipeline]["receivers"] == ["otlp"]


def test_every_configured_address_has_a_listener():
    """Collector to Jaeger, Prometheus to collector, Grafana to both, exemplars to Jaeger."""

    def port(address: str) -> str:
        return address.rpartition(":")[2]

    otlp = COLLECTOR["receivers"]["otlp"]["protocols"]
    to_jaeger = COLLECTOR["exporters"]["otlp_grpc/jaeger"]["endpoint"]
    jaeger_in = JAEGER["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    own = COLLECTOR["service"]["telemetry"]["metrics"]["readers"][0]["pull"]["exporter"]["prometheus"]["port"]
    jaeger_ui = JAEGER["extensions"]["jaeger_query"]["http"]["endpoint"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in PROMETHEUS["scrape_configs"]}
    published = {name: [p.split(":")[2] for p in service.get("ports", [])] for name, service in SERVICES.items()}
    sources = {source["uid"]: source for source in DATASOURCES}

    assert to_jaeger == f"jaeger:{port(jaeger_in)}"
    assert targets == {
        "asel": [f"collector:{port(COLLECTOR['exporters']['prometheus']['endpoint'])}"],
        "collector": [f"collector:{own}"],
    }
    assert (
        published["collector"] == [port(otlp["grpc"]["endpoint"]), port(otlp["http"]["endpoint"])] == ["4317", "4318"]
    )
    assert published["jaeger"] == [port(jaeger_ui)]
    assert sources["asel-jaeger"]["url"] == f"http://jaeger:{port(jaeger_ui)}"
    assert sources["asel-prometheus"]["url"] == f"http://prometheus:{published['prometheus'][0]}"
    (exemplars,) = sources["asel-prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplars == {"name": "trace_id", "datasourceUid": "asel-jaeger"}
    assert COLLECTOR["exporters"]["prometheus"]["enable_open_metrics"], "exemplars travel in no other format"
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
    for name, config, extension in (
        ("collector-health", COLLECTOR, "health_check"),
        ("jaeger", JAEGER, "healthcheckv2"),
    ):
        found = config["extensions"][extension]
        asked = urlparse(SERVICES[name]["healthcheck"]["test"][-1])
        assert str(asked.port) == port((found.get("http") or found)["endpoint"])


SERVICES: dict[str, Any] = COMPOSE["services"]


def test_compose_fits_its_schema():
    """The schema comes with check-jsonschema, without a network."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run([*command, FOLDER / "compose.yaml"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_pinned_private_and_health_checked(name):
    """An exact version, ports on loopback, a health check, read-only configuration that exists, no secrets."""
    service = SERVICES[name]
    assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+", service["image"])
    assert "healthcheck" in service or f"{name}-health" in SERVICES
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)
    for volume in service.get("volumes", []):
        source, _, mode = volume.partition(":")
        if source.startswith("."):
            assert (FOLDER / source).exists()
            assert mode.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]
    assert not [key for key in service.get("environment", {}) if re.search("PASSWORD|SECRET|TOKEN|KEY", key)]
    assert not {"privileged", "network_mode", "env_file", "secrets", "build"} & set(service)


def test_grafana_finds_its_dashboard():
    """Provider, home dashboard and mounts name the same folder."""
    (provider,) = load("grafana/provisioning/dashboards/dashboards.yaml")["providers"]
    inside = provider["options"]["path"]
    assert f"./grafana/dashboards:{inside}:ro" in SERVICES["grafana"]["volumes"]
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{inside}/asel.json"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_summary_a_description_and_instructions(name):
    """It has a severity and a section of the README; templates use labels that the alert has."""
    alert = ALERTS[name]
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert len(notes["description"]) > 100
    assert alert["labels"]["severity"] in {"warning", "critical"}
    assert notes["runbook"] == f"observability/README.md#{name.lower()}"
    assert f"\n### {name}\n" in README
    labels = labels_of(promql.parse(alert["expr"]))
    assert set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"])) <= labels
    for title in re.findall(r'"([^"]+)"', notes["description"].replace('isolation="process"', "")):
        assert title in PANELS


def test_the_readme_has_a_section_for_each_alert_and_no_other():
    """A renamed alert needs a renamed section."""
    assert re.findall(r"^### (Asel\w+)$", README, re.MULTILINE) == list(ALERTS)
    for title in re.findall(r"dashboard's\s+\*([^*]+)\*", README):
        assert title in PANELS


def test_each_alert_is_tested_both_ways():
    """`rules_test.yaml` is in promtool's form, uses only series that exist, and has each alert fire and stay silent."""
    assert set(RULE_TESTS) == {"rule_files", "evaluation_interval", "tests"}
    assert RULE_TESTS["rule_files"] == ["rules.yaml"]
    fires, silent = set(), set()
    for case in RULE_TESTS["tests"]:
        assert set(case) == {"name", "interval", "input_series", "alert_rule_test"}
        for series in case["input_series"]:
            labels_of(promql.parse(series["series"]))
            assert re.fullmatch(r"(?:_|-?\d+)(?:\+\d+)?(?:x\d+)?(?: (?:_|-?\d+)(?:\+\d+)?(?:x\d+)?)*", series["values"])
        for check in case["alert_rule_test"]:
            assert set(check) == {"eval_time", "alertname", "exp_alerts"}
            assert promql.parse_duration(check["eval_time"])
            (fires if check["exp_alerts"] else silent).add(check["alertname"])
            for expected in check["exp_alerts"]:
                alert = ALERTS[check["alertname"]]
                assert set(expected["exp_labels"]) == labels_of(promql.parse(alert["expr"])) | {"severity"}
                assert expected["exp_annotations"]["description"] == alert["annotations"]["description"]
    assert fires == silent == set(ALERTS)


# Prometheus' own judgement, where Debian's `prometheus` is installed. Its absence shows in the test's name.
CHECKS = [
    ["check", "config", "prometheus.yaml"],
    ["check", "rules", "rules.yaml"],
    ["test", "rules", "rules_test.yaml"],
]


@pytest.mark.parametrize(
    "arguments",
    CHECKS if PROMTOOL else [None],
    ids=" ".join if PROMTOOL else lambda _: "promtool is not installed, so no rule was evaluated",
)
def test_promtool_accepts_configuration_and_rules(arguments):
    """The alerts fire and stay silent as their tests expect."""
    if arguments is None:
        assert PROMETHEUS["rule_files"] == ["rules.yaml"]
        return
    result = subprocess.run(
        [PROMTOOL, *arguments], cwd=FOLDER / "prometheus", capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(120)  # another process loads JAX and tunes; Prometheus waits for 5 s before it scrapes
@pytest.mark.parametrize(
    "program",
    [PROMETHEUS_PROGRAM],
    ids=["prometheus" if PROMETHEUS_PROGRAM else "prometheus is not installed, so no panel was asked"],
)
def test_every_panel_and_every_alert_shows_a_real_run(program):
    """Prometheus has data for each query of the dashboard, its links lead to spans, and each alert is on its way."""
    command = [sys.executable, ROOT / "tests/benchmarks/panels.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if program is None:
        assert (result.returncode, result.stderr) == (1, "no prometheus on PATH: apt-get install prometheus\n")
    else:
        assert result.returncode == 0, result.stdout + result.stderr
