// SPDX-License-Identifier: Apache-2.0
//! Tests of `measured`.
use super::*;
use serde_json::json;

fn given(value: &Value) -> Vec<(String, f64)> {
    let mut found: Vec<_> =
        parse("r.json", value.to_string().as_bytes()).unwrap().into_iter().map(|given| (given.name, given.value)).collect();
    found.sort_by(|one, next| one.0.cmp(&next.0));
    found
}

#[test]
fn records_and_reports_say_the_same() {
    let record = json!({"printed": ["  fetch_many, 16 at once, each   138.1 ns", "  fetch     1.2 us", "  pull, 1024 KiB     106.6 us",
        "  pull, 1024 KiB, speed      9.84 GB/s", "  publish, 1024 KiB, speed   26.5 GB/s"]});
    let report = json!({"figures": [{"name": "fetch", "value": 1200.0, "unit": "ns"}, {"name": "pull, 1024 KiB", "value": 1.0,
        "unit": "ns"},
        {"name": "pull, 1024 KiB, speed", "value": 9.84, "unit": "GB/s"}, {"name": "publish, 1024 KiB, speed", "value": 26.5,
            "unit": "GB/s"}]});
    let wanted = [("device.device_gb_s", 9.84), ("device.latency_ns", 1200.0), ("device.read_gb_s", 9.84), ("device.write_gb_s", 26.5)];
    let wanted: Vec<_> = wanted.map(|(name, value)| (name.to_string(), value)).to_vec();
    assert_eq!(given(&record), wanted);
    assert_eq!(given(&report), wanted);
}

#[test]
fn a_file_without_figures_is_refused_by_name() {
    let said = |text: &str| parse("r.json", text.as_bytes()).unwrap_err().to_string();
    assert!(said("{\"printed\": [3]}").starts_with("r.json: none of the figures"));
    assert!(said("{\n\"printed\"").starts_with("r.json:2: not JSON"));
}
