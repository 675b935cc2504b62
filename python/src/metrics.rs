// SPDX-License-Identifier: Apache-2.0
//! Metrics as numbers in a dictionary, read back from the text for Prometheus, so that both always say the same.

use crate::failure::Outcome;
use crate::member::Member;
use cxl_pool::media::{Identity, uuid_text};
use cxl_pool::metrics::stats::{HostStats, Stat, read_all};
use cxl_pool::metrics::{Exposition, Kind, Seconds};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Whether counters are of the life that the slot's host has now: those of an earlier one would go back when this one tells of itself.
fn is_of_now(member: &Member, host: &HostStats) -> bool {
    let identity = member.pool.lines().fetch::<Identity>(host.slot.into());
    host.incarnation != 0 && identity.is_ok_and(|identity| identity.incarnation == host.incarnation)
}

/// The counters that every host has published in the pool, as text for Prometheus, under the names of `cxlctl exporter`
/// (docs/operating/metrics.md). Counters that the pool has no room for, or that their host has not published yet, are left out.
pub fn of_pool(member: &Member) -> Outcome<String> {
    let hosts: Vec<HostStats> = read_all(member.pool.lines())?.into_iter().filter(|host| is_of_now(member, host)).collect();
    let mut text = String::new();
    let uuid = uuid_text(member.pool.superblock().uuid());
    let mut out = Exposition::with_label(&mut text, "pool", &uuid);
    for stat in Stat::ALL {
        let is_time = *stat == Stat::LockWaitNs;
        let suffix = if stat.kind() == Kind::Counter { "_total" } else { "" };
        let name = if is_time { "lock_wait_seconds" } else { stat.name() };
        let name = format!("cxl_pool_host_{name}{suffix}");
        out.family(&name, stat.kind(), stat.help().trim_end_matches(", in nanoseconds."));
        for host in hosts.iter().filter(|host| host.has(*stat)) {
            let (slot, value) = (host.slot.to_string(), host.get(*stat));
            let labels = [("slot", &*slot)];
            match is_time {
                true => out.sample(&name, "", &labels, Seconds { ns: value }),
                false => out.sample(&name, "", &labels, value),
            }
        }
    }
    Ok(text)
}

/// `name[{labels}] value`, taken apart; the labels as they are written.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = series.split_once('{').map_or((series, ""), |(name, labels)| (name, labels.trim_end_matches('}')));
    Some((name, labels, value.parse().ok()?))
}

/// The numbers of a text: counters and gauges by name, those with a label by name and the label's value, of histograms `NAME_count` and
/// `NAME_sum`.
pub fn dict_of<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(sample);
    for (name, labels, value) in samples.filter(|(name, ..)| !name.ends_with("_bucket")) {
        if labels.is_empty() {
            all.set_item(name, value)?;
            continue;
        }
        // One label each, whose value is a word of ours.
        let value_of = labels.split_once("=\"").map_or(labels, |(_, value)| value.trim_end_matches('"'));
        let inner = match all.get_item(name)? {
            Some(inner) => inner.cast_into::<PyDict>()?,
            None => {
                let inner = PyDict::new(py);
                all.set_item(name, &inner)?;
                inner
            }
        };
        inner.set_item(value_of, value)?;
    }
    Ok(all)
}
