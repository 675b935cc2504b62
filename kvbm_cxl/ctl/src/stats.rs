// SPDX-License-Identifier: Apache-2.0
//! Medians, and ratios with the noise that they carry.

use serde::Serialize;

/// The value below which `part` (0 to 1) of the values lie; zero of none.
pub fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * part).round() as usize).copied().unwrap_or(0.0)
}

/// The middle value; zero of none.
pub fn median(values: &mut [f64]) -> f64 {
    quantile(values, 0.5)
}

/// A median with its 95 % confidence interval, which needs no assumption about how the values are spread.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Estimate {
    /// The middle value.
    pub median: f64,
    /// The median of many more values would hardly lie below this.
    pub low: f64,
    /// Nor above this.
    pub high: f64,
}

impl Estimate {
    /// Of a sample, which must not be empty to mean anything.
    pub fn of(mut values: Vec<f64>) -> Estimate {
        let count = values.len() as f64;
        // Order statistics: the number of values below the true median is binomial with p = 1/2.
        let half = if count > 0.0 { 0.98 / count.sqrt() } else { 0.5 };
        Estimate {
            median: median(&mut values),
            low: quantile(&mut values, (0.5 - half).max(0.0)),
            high: quantile(&mut values, (0.5 + half).min(1.0)),
        }
    }

    /// Of the ratios of pairs that were measured next to each other, so that whatever the machine did falls on both.
    pub fn of_ratios(above: &[f64], below: &[f64]) -> Estimate {
        Estimate::of(above.iter().zip(below).map(|(above, below)| above / below).collect())
    }

    /// Whether it is above `limit` by more than chance explains.
    pub fn exceeds(&self, limit: f64) -> bool {
        self.low > limit
    }
}

impl Estimate {
    /// Whether it is below `limit` by more than chance explains.
    pub fn falls_short(&self, limit: f64) -> bool {
        self.high < limit
    }
}

/// A length of time in the unit that reads best.
pub fn time_text(ns: f64) -> String {
    match ns {
        ns if ns < 1e4 => format!("{ns:.1} ns"),
        ns if ns < 1e7 => format!("{:.1} us", ns / 1e3),
        ns => format!("{:.1} ms", ns / 1e6),
    }
}

/// Rows of text in columns: the first to the left, the others to the right.
pub fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| match column {
            0 => format!("{cell:<width$}", width = widths[0]),
            _ => format!("{cell:>width$}", width = widths[column]),
        });
        text.push_str("  ");
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_intervals() {
        let mut values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        assert_eq!((median(&mut values), quantile(&mut values, 0.99), quantile(&mut [], 0.5)), (50.0, 99.0, 0.0));
        let estimate = Estimate::of(values);
        assert!((35.0..50.0).contains(&estimate.low) && (50.0..65.0).contains(&estimate.high), "{estimate:?}");
        assert!(estimate.exceeds(30.0) && !estimate.exceeds(45.0));
        let alone = Estimate::of(vec![2.0]);
        assert_eq!((alone.low, alone.median, alone.high), (2.0, 2.0, 2.0));
    }

    #[test]
    fn numbers_line_up() {
        let rows = [vec!["a".into(), "1".into()], vec!["long".into(), "100".into()]];
        assert_eq!(columns(&rows), "  a       1\n  long  100\n");
    }
}
