// SPDX-License-Identifier: Apache-2.0
//! What the pool logs, on stderr.

use log::{LevelFilter, Log, Metadata, Record};
use std::io::Write;

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let text = record.args().to_string().replace(['\n', '\r'], " ");
        // A stderr that is closed is no reason to end.
        let _ = writeln!(std::io::stderr(), "cxlctl: {}: {text}", record.level().as_str().to_lowercase());
    }

    fn flush(&self) {}
}

/// Has warnings and errors of the pool written to stderr from now on.
pub fn install() {
    // Fails only where a logger is there already, which then has them.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
