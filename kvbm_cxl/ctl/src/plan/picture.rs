// SPDX-License-Identifier: Apache-2.0
//! A plan as charts: hits, times, bytes and load by the size of the memory.

use crate::report::{Plan, Row};
use ctl_common::planner::sim::{Routing, System};
use ctl_common::svg::{self, Curve, Key, Panel, Style};

type Value = fn(&Row) -> f64;

const PANELS: [(&str, &str, Value); 5] = [
    ("Hit rate", "tokens found, %", |row| row.outcome.hit_rate * 100.0),
    ("Time to the first token, mean", "s", |row| row.outcome.ttft.mean_s),
    ("Time to the first token, P99", "s", |row| row.outcome.ttft.p99_s),
    ("Bytes moved per request", "GB", |row| row.outcome.counts.moved_bytes() / 1e9 / row.outcome.counts.requests_out.max(1) as f64),
    ("Load of the busiest device", "busy, % of the time", |row| row.outcome.device_load_most * 100.0),
];

/// A colour for a system, a dash for a routing; what a wider line shows below a narrower one stays seen.
fn style(system: System, routing: Routing) -> Style {
    let colour = match system {
        System::Own => "#d55e00",
        System::Pool => "#0072b2",
        System::PoolL2 => "#009e73",
    };
    match routing {
        Routing::LeastLoaded => Style(colour, "", 3.6),
        Routing::PrefixAware => Style(colour, "7 3", 2.0),
        Routing::RoundRobin => Style(colour, "2 3", 1.6),
    }
}

/// The picture.
pub fn draw(plan: &Plan) -> String {
    let mut lines: Vec<(System, Routing)> = Vec::new();
    let mut sizes: Vec<f64> = Vec::new();
    for row in &plan.rows {
        if !lines.contains(&(row.system, row.routing)) {
            lines.push((row.system, row.routing));
        }
        if !sizes.contains(&row.size_gib) {
            sizes.push(row.size_gib);
        }
    }
    sizes.sort_by(f64::total_cmp);
    let rows = |line: &(System, Routing)| {
        let mut rows: Vec<&Row> = plan.rows.iter().filter(|row| (row.system, row.routing) == *line).collect();
        rows.sort_by(|one, next| one.size_gib.total_cmp(&next.size_gib));
        rows
    };
    let panel = |&(title, y_label, value): &(&str, &str, Value)| {
        let highest = plan.rows.iter().map(value).fold(0.0, f64::max);
        Panel {
            title: title.into(),
            x_label: "GiB in all: the pool, or own DRAM of all".into(),
            x_marks: sizes.clone(),
            y_label: y_label.into(),
            y_from: Some(0.0),
            y_step: svg::step(highest),
            curves: lines.iter().map(|line| Curve { points: rows(line).iter().map(|row| (row.size_gib, value(row))).collect() }).collect(),
        }
    };
    let key = |&(system, routing): &(System, Routing)| Key {
        name: format!("{}, {}", system.name(), routing.name()),
        meaning: String::new(),
        style: style(system, routing),
    };
    let name = std::path::Path::new(&plan.trace.file).file_name().map_or("trace".into(), |name| name.to_string_lossy());
    let heading = format!("{name}, {} instances, preset {} (simulated)", plan.described.rack.instances, plan.described.preset.name);
    svg::draw(&heading, &PANELS.iter().map(panel).collect::<Vec<_>>(), &lines.iter().map(key).collect::<Vec<_>>())
}
