// SPDX-License-Identifier: Apache-2.0
//! Numbers and tables for people.

/// A size with a binary unit, exact where that is short.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (0..UNITS.len() - 1).find(|unit| bytes >> (10 * unit) < 1024).unwrap_or(UNITS.len() - 1);
    if bytes.trailing_zeros() as usize >= 10 * unit || bytes == 0 {
        return format!("{} {}", bytes >> (10 * unit), UNITS[unit]);
    }
    format!("{:.1} {}", bytes as f64 / f64::powi(1024.0, unit as i32), UNITS[unit])
}

/// Text from the pool, which may hold anything, made safe for a terminal.
pub fn safe(text: &str) -> String {
    cxl_pool::escaped(text).into_owned()
}

/// Numbers with commas; `-` when there is none.
pub fn list<T: std::fmt::Display>(values: &[T]) -> String {
    if values.is_empty() {
        return "-".into();
    }
    values.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

/// Lines up columns, the first row as their heads.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests;
