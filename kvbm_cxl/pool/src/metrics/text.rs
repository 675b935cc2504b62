// SPDX-License-Identifier: Apache-2.0
//! The text in which Prometheus reads metrics (text exposition format, version 0.0.4).

use std::fmt::{self, Display, Write};

/// What an HTTP answer with this text calls it.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises; starts again at zero when its process or host does.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Counts per size, their sum and their number.
    Histogram,
}

impl Kind {
    /// As it is written in a TYPE line.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// Writes metrics to a string: a [`Exposition::family`], then its samples.
pub struct Exposition<'a> {
    out: &'a mut String,
    common: Option<(&'a str, &'a str)>,
}

impl<'a> Exposition<'a> {
    /// Appends to `out`.
    pub fn new(out: &'a mut String) -> Self {
        Exposition { out, common: None }
    }

    /// Appends to `out`; every sample begins with the label `name="value"`.
    pub fn with_label(out: &'a mut String, name: &'a str, value: &'a str) -> Self {
        Exposition { out, common: Some((name, value)) }
    }

    /// Begins the samples of the metric `name`.
    pub fn family(&mut self, name: &str, kind: Kind, help: &str) {
        self.out.push_str("# HELP ");
        self.out.push_str(name);
        self.out.push(' ');
        self.escape(help, false);
        self.out.push_str("\n# TYPE ");
        self.out.push_str(name);
        self.out.push(' ');
        self.out.push_str(kind.name());
        self.out.push('\n');
    }

    /// Writes a sample of `name` with `suffix` after it, which only histograms have.
    pub fn sample(&mut self, name: &str, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        self.out.push_str(name);
        self.out.push_str(suffix);
        let common = self.common;
        let labels = || common.iter().chain(labels);
        for (index, (label, text)) in labels().enumerate() {
            self.out.push(if index == 0 { '{' } else { ',' });
            self.out.push_str(label);
            self.out.push_str("=\"");
            self.escape(text, true);
            self.out.push('"');
        }
        if labels().next().is_some() {
            self.out.push('}');
        }
        // Writing to a string cannot fail.
        let _ = writeln!(self.out, " {value}");
    }

    /// A help text may hold quotes as they are, the value of a label may not.
    fn escape(&mut self, text: &str, is_label: bool) {
        for c in text.chars() {
            match c {
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '"' if is_label => self.out.push_str("\\\""),
                other => self.out.push(other),
            }
        }
    }
}

/// A time that is kept in nanoseconds and shown in seconds, exactly.
pub struct Seconds {
    /// The time.
    pub ns: u64,
}

impl Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, mut rest, mut digits) = (self.ns / 1_000_000_000, self.ns % 1_000_000_000, 9);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        while rest.is_multiple_of(10) {
            (rest, digits) = (rest / 10, digits - 1);
        }
        write!(f, "{whole}.{rest:0digits$}")
    }
}

#[cfg(test)]
mod tests;
