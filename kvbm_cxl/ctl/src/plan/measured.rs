// SPDX-License-Identifier: Apache-2.0
//! Costs that were measured: from a file of perf/records, or from what `cxl-bench line --json` or `cxl-bench pool --json` printed.

use ctl_common::planner::error::{Origin, PlanError, Planned};
use ctl_common::planner::rack::Given;
use serde_json::Value;
use std::path::Path;

/// What a figure of the benchmarks is called, and the numbers of a rack that it gives.
const FIGURES: [(&str, &[&str]); 3] = [
    ("fetch", &["device.latency_ns"]),
    ("pull, 1024 KiB, speed", &["device.read_gb_s", "device.device_gb_s"]),
    ("publish, 1024 KiB, speed", &["device.write_gb_s"]),
];

/// Reads a file. Every figure that a rack has a use for is taken; a file with none is refused.
pub fn read(path: &Path) -> Planned<Vec<Given>> {
    let file = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|source| PlanError::Unusable { file: file.clone(), source })?;
    parse(&file, &bytes)
}

fn parse(file: &str, bytes: &[u8]) -> Planned<Vec<Given>> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| PlanError::Malformed {
        origin: Origin::Line { file: file.into(), line: error.line() },
        what: format!("not JSON ({error})"),
        remedy: "give a record of perf/records, or the output of cxl-bench with --json".into(),
    })?;
    let found: Vec<Given> = FIGURES
        .iter()
        .filter_map(|(name, keys)| figure(&value, name).map(|value| (keys, value)))
        .flat_map(|(keys, value)| keys.iter().map(move |key| (key, value)))
        .map(|(key, value)| Given { name: key.to_string(), value, origin: Origin::File(file.into()) })
        .collect();
    if found.is_empty() {
        let names: Vec<String> = FIGURES.iter().map(|(name, _)| format!("{name:?}")).collect();
        return Err(PlanError::Malformed {
            origin: Origin::File(file.into()),
            what: format!("none of the figures {}", names.join(", ")),
            remedy: "give a record of `make perf-line` or `make perf-pool`".into(),
        });
    }
    Ok(found)
}

/// A figure in nanoseconds or GB/s.
fn figure(report: &Value, name: &str) -> Option<f64> {
    let figures = report.get("figures").and_then(Value::as_array).into_iter().flatten();
    let exact = figures.filter(|figure| figure.get("name").and_then(Value::as_str) == Some(name));
    if let Some(value) = exact.filter_map(|figure| figure.get("value").and_then(Value::as_f64)).next() {
        return Some(value);
    }
    let printed = report.get("printed").and_then(Value::as_array).into_iter().flatten();
    printed.filter_map(Value::as_str).find_map(|line| in_line(line, name))
}

/// The figure of a line such as `  fetch        267.2 ns`: name and value are two spaces or more apart.
fn in_line(line: &str, name: &str) -> Option<f64> {
    let rest = line.trim_start().strip_prefix(name)?.strip_prefix("  ")?;
    let (value, unit) = rest.trim().split_once(' ')?;
    let value: f64 = value.parse().ok()?;
    match unit.trim() {
        "ns" | "GB/s" => Some(value),
        "us" => Some(value * 1e3),
        "ms" => Some(value * 1e6),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
