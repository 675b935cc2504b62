# SPDX-License-Identifier: Apache-2.0
"""Alert rules under promtool: each fires for the pool that is in trouble, and for that one alone, at scrape intervals of 15 to 60 s."""

import re
import subprocess

import charts
import pytest
import yaml

RULES = charts.CHART / "dashboards" / "alerts.yaml"
RUNBOOKS = charts.ROOT / "docs/operating/alerts.md"
(GROUP,) = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
HEALTHY, BAD = {"pool": "11-aa", "instance": "a:9477"}, {"pool": "22-bb", "instance": "b:9477"}
ENGINE = {"instance": "engine-b:8000"}
HOST = {**BAD, "slot": "3"}
# Alert -> the series in which the second pool is in trouble, by name and labels: (values when healthy, values in trouble), per minute;
# and the labels of the alert. A value is a start and a rise, or a constant.
LIVE = {"machine": "m", "name": "node/host", "state": "live", "standing": "not fenced"}
INFO, NAMED = ("cxl_pool_host_info", {"slot": "3", **LIVE}, "1", "1"), {**HOST, "name": "node/host"}
TROUBLE = {
    "CxlPoolNotSeen": ([("cxl_pool_info", {"uuid": "{pool}"}, "1", None)], BAD),
    "CxlPoolHasNoManager": ([("cxl_pool_seat_beats_total", {"seat": "0"}, "0+40", "500")], BAD),
    "CxlPoolHasOneManager": ([("cxl_pool_living_seats", {}, "3", "1")], BAD),
    "CxlHostStandsStill": (
        [("cxl_pool_host_heartbeats_total", {"slot": "3"}, "0+600", "500"), ("cxl_pool_host_info", {"slot": "3", **LIVE}, "1", "1")],
        {**HOST, **LIVE},
    ),
    "CxlHostFenced": (
        [
            ("cxl_pool_host_info", {"slot": "3", **LIVE}, "1", None),
            ("cxl_pool_host_info", {"slot": "3", **LIVE, "standing": "fenced"}, None, "1"),
        ],
        {**HOST, **LIVE, "standing": "fenced"},
    ),
    "CxlHostRejoins": ([("cxl_pool_host_rejoins_total", {"slot": "3"}, "5", "0+1"), INFO], NAMED),
    "CxlPoolSlotsRunOut": (
        [("cxl_pool_slots", {"state": "free"}, "9", "1"), ("cxl_pool_slots", {"state": "left"}, "0", "0")],
        BAD,
    ),
    "CxlPoolWaitsForProof": ([("cxl_pool_awaited_bytes", {"slot": "3"}, "0", "4096"), INFO], NAMED),
    "CxlPoolDamaged": (
        [("cxl_pool_host_misses_damaged_total", {"slot": "3"}, "0", "0+1"), ("cxl_pool_cells", {"state": "damaged"}, "0", "0")],
        BAD,
    ),
    "CxlPoolIsTooSmall": (
        [("cxl_pool_blocks", {}, "100000", "1000"), ("cxl_pool_host_evictions_total", {"slot": "3"}, "0+60", "0+600")],
        BAD,
    ),
    "CxlPoolRefusesBlocks": ([("vllm:kvbm_cxl_published_blocks_total", {"outcome": "no_cell"}, "0", "0+1")], ENGINE),
    "CxlNixlTransfersFail": ([("cxl_pool_host_nixl_failed_total", {"slot": "3"}, "4", "0+1"), INFO], NAMED),
    "CxlLoadsFail": ([("vllm:kvbm_cxl_loads_total", {"result": "failed"}, "0", "0+1")], ENGINE),
    "CxlEngineIsIsolated": ([("vllm:kvbm_cxl_isolated", {}, "0", "1")], ENGINE),
    "CxlPromptsAreForeign": ([("vllm:kvbm_cxl_handovers_total", {"result": "foreign"}, "2", "0+1")], ENGINE),
}


def series(name, labels):
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}"


def values(per_minute, interval_s, minutes):
    """promtool's notation of a value that stays, or that rises by so much a minute."""
    start, _, rise = per_minute.partition("+")
    count = minutes * 60 // interval_s
    return f"{start}+{float(rise or 0) * interval_s / 60}x{count}"


def case(alert, interval_s):
    """A test of promtool: both pools are healthy for 75 minutes, then the second one is in trouble for 45."""
    given, firing = [], {**TROUBLE[alert][1], **ALERTS[alert]["labels"]}
    well, ill = 75, 45
    for name, labels, healthy, trouble in TROUBLE[alert][0]:
        places = ({"instance": "engine-a:8000"}, ENGINE) if name.startswith("vllm:") else (HEALTHY, BAD)
        for place in places:
            of = {**place, **{label: value.format(**place) for label, value in labels.items()}}
            first = values(healthy, interval_s, well) if healthy else f"_x{well * 60 // interval_s}"
            then = healthy if place is places[0] else trouble
            # A counter continues from its last value.
            begin = float(healthy.partition("+")[2] or 0) * well + float(healthy.partition("+")[0]) if healthy else 0
            if then and "+" in then:
                then = f"{begin}+{then.partition('+')[2]}"
            elif then and healthy and "+" in healthy:
                then = f"{begin}"
            second = values(then, interval_s, ill) if then else f"_x{ill * 60 // interval_s}"
            given.append({"series": series(name, of), "values": f"{first} {second}"})
    late = well + ill - 5
    alerts = [{"exp_labels": firing, "exp_annotations": {}}]
    return given, [
        {"eval_time": f"{well - 1}m", "alertname": alert, "exp_alerts": []},
        {"eval_time": f"{late}m", "alertname": alert, "exp_alerts": alerts},
    ]


@pytest.fixture(scope="session")
def promtool():
    found = sorted((charts.ROOT / ".venv/deploy/tools").rglob("bin/promtool"))
    if not found:
        pytest.skip("no promtool here: run make setup-deploy")
    return found[0]


def run_tests(promtool, folder, names, tests, evaluation_interval):
    """Runs promtool's tests over these alerts. Rules have no annotations here: promtool compares them word for word."""
    bare = [{key: value for key, value in ALERTS[name].items() if key != "annotations"} for name in names]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "tried", "rules": bare}]}))
    described = {"rule_files": ["rules.yaml"], "evaluation_interval": evaluation_interval, "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(described))
    done = subprocess.run([promtool, "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("interval_s", [15, 30, 60])
def test_an_alert_fires_for_the_pool_in_trouble_alone(promtool, tmp_path, interval_s):
    tests = []
    for alert in ALERTS:
        given, expected = case(alert, interval_s)
        tests.append({"name": alert, "interval": f"{interval_s}s", "input_series": given, "alert_rule_test": expected})
    run_tests(promtool, tmp_path, ALERTS, tests, "15s")


def test_an_exporter_that_moves_to_another_address_is_seen(promtool, tmp_path):
    """A pod that is started again has another address: the pool was never away."""
    given = [
        {"series": series("cxl_pool_info", {"pool": "u", "uuid": "u", "instance": "10.0.0.1:9477"}), "values": "1x60 _x60"},
        {"series": series("cxl_pool_info", {"pool": "u", "uuid": "u", "instance": "10.0.0.2:9477"}), "values": "_x60 1x60"},
    ]
    expected = [{"eval_time": "100m", "alertname": "CxlPoolNotSeen", "exp_alerts": []}]
    test = {"interval": "1m", "input_series": given, "alert_rule_test": expected}
    run_tests(promtool, tmp_path, ["CxlPoolNotSeen"], [test], "1m")


def test_every_alert_is_tried_and_has_a_runbook():
    assert set(TROUBLE) == set(ALERTS)
    sections = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/operating/alerts.md#{name.lower()}", name


def test_no_rule_adds_pools_up():
    """Every aggregation and every match over series of pools keeps the pool apart."""
    for name, rule in ALERTS.items():
        if "cxl_pool_" not in rule["expr"]:
            continue
        for kept in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
            assert {"pool", "uuid"} & {label.strip() for label in kept.split(",")}, f"{name}: {kept}"
        assert not re.search(r"\b(?:sum|max|min|avg|count|group)\s*\((?!max_over)", rule["expr"].replace("max_over_time(", "")), name
