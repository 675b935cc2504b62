// SPDX-License-Identifier: Apache-2.0
//! What a benchmark prints: figures, ratios with their 95 % intervals, targets.

use ctl_common::stats::{Estimate, columns, median, time_text};
use cxl_pool::{Error, Result};
use serde::Serialize;

#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
}

/// A ratio to a baseline of this machine, measured in turn with it.
#[derive(Debug, Serialize)]
struct Ratio {
    name: &'static str,
    #[serde(flatten)]
    value: Estimate,
}

/// A goal, and whether this run met it.
#[derive(Debug, Serialize)]
struct Target {
    text: String,
    is_met: bool,
}

#[derive(Debug, Default, Serialize)]
pub struct Bench {
    title: String,
    figures: Vec<Figure>,
    ratios: Vec<Ratio>,
    targets: Vec<Target>,
    /// Remarks, printed last.
    pub notes: Vec<String>,
}

impl Bench {
    pub fn new(title: impl Into<String>) -> Bench {
        Bench { title: title.into(), ..Bench::default() }
    }

    pub fn figure(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.figures.push(Figure { name: name.into(), value, unit });
    }

    /// Adds the median of times, in nanoseconds.
    pub fn time(&mut self, name: impl Into<String>, taken_ns: &[f64]) {
        self.figure(name, median(&mut taken_ns.to_vec()), "ns");
    }

    /// Adds the speed of copies of `len_bytes` by the median of their times.
    pub fn speed(&mut self, name: impl Into<String>, len_bytes: usize, taken_ns: &[f64]) {
        self.figure(name, len_bytes as f64 / median(&mut taken_ns.to_vec()), "GB/s");
    }

    pub fn ratio(&mut self, name: &'static str, value: Estimate) {
        self.ratios.push(Ratio { name, value });
    }

    /// Adds a ratio that should not exceed `limit` beyond noise.
    pub fn at_most(&mut self, name: &'static str, value: Estimate, limit: f64) {
        self.target(name, &value, format!("at most {limit:.2}"), !value.exceeds(limit));
        self.ratio(name, value);
    }

    /// Adds a ratio that should not fall below `limit` beyond noise.
    pub fn at_least(&mut self, name: &'static str, value: Estimate, limit: f64) {
        self.target(name, &value, format!("at least {limit:.2}"), !value.falls_short(limit));
        self.ratio(name, value);
    }

    fn target(&mut self, name: &str, value: &Estimate, goal: String, is_met: bool) {
        let text = format!("{name}: {:.2} ({:.2} to {:.2}), {goal}", value.median, value.low, value.high);
        self.targets.push(Target { text, is_met });
    }

    /// Adds all of another benchmark.
    pub fn append(&mut self, other: Bench) {
        self.notes.push(other.title);
        self.figures.extend(other.figures);
        self.ratios.extend(other.ratios);
        self.targets.extend(other.targets);
        self.notes.extend(other.notes);
    }

    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        let figure = |figure: &Figure| match figure.unit {
            "ns" => vec![figure.name.clone(), time_text(figure.value)],
            unit => vec![figure.name.clone(), format!("{:.2} {unit}", figure.value)],
        };
        text.push_str(&columns(&self.figures.iter().map(figure).collect::<Vec<_>>()));
        if !self.ratios.is_empty() {
            text.push_str("\nRatios (95 % interval)\n");
            let ratio = |Ratio { name, value }: &Ratio| {
                vec![name.to_string(), format!("{:.3}", value.median), format!("{:.3} to {:.3}", value.low, value.high)]
            };
            text.push_str(&columns(&self.ratios.iter().map(ratio).collect::<Vec<_>>()));
        }
        if !self.targets.is_empty() {
            text.push_str("\nTargets\n");
        }
        for Target { text: target, is_met } in &self.targets {
            text.push_str(&format!("  {} {target}\n", if *is_met { "met   " } else { "missed" }));
        }
        self.notes.iter().for_each(|note| text.push_str(&format!("\n{note}\n")));
        text
    }

    /// The last line, for `perf/run.py`.
    pub fn ratios_line(&self) -> String {
        let ratios: serde_json::Map<_, _> = self.ratios.iter().map(|ratio| (ratio.name.into(), ratio.value.median.into())).collect();
        format!("RATIOS {}", serde_json::Value::from(ratios))
    }
}

pub fn to_json(value: &impl Serialize) -> Result<serde_json::Value> {
    serde_json::to_value(value).map_err(|error| Error::Invalid(format!("writing JSON: {error}")))
}
