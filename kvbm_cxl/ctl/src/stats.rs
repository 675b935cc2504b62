// SPDX-License-Identifier: Apache-2.0
//! Medians, and ratios with the noise that they carry.

use cxl_pool::Result;
use serde::Serialize;

/// Measures each of `ways` once a batch, in an order that rotates, so that other load falls on all of them. `measure` is given the batch
/// and the way. The result has the values of each way.
///
/// # Errors
/// Those of `measure`.
pub fn in_turn(ways: usize, batches: u64, mut measure: impl FnMut(u64, usize) -> Result<f64>) -> Result<Vec<Vec<f64>>> {
    let mut values = vec![Vec::new(); ways];
    for batch in 0..batches {
        for turn in 0..ways {
            let way = (turn + batch as usize) % ways;
            values[way].push(measure(batch, way)?);
        }
    }
    Ok(values)
}

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
mod tests;
