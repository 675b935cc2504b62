// SPDX-License-Identifier: Apache-2.0
//! A zombie unbinds the name in the first cell of the object table and with it clears the last cell, while its successor seals the two:
//! what it reads of them, one after the other, never was in the memory at one time.
//!
//! Checked: the name lies in one cell, which its lookup reaches.

use super::setup::{Cluster, join};
use crate::{Chances, Failure, Fault, Planned, Stats, When, WritePath};
use cxl_pool::objects::Objects;
use cxl_pool::{Error, fsck};

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = Cluster::new(seed, 2, 2, |config, _| {
        config.geometry.objects = 3;
        config.write_path = WritePath::OneUnit;
        config.chances = Chances::default();
    });
    // The first machine has a manager seat for certain.
    let (zombie, successor) = (cluster.hosts[1], cluster.hosts[0]);
    let at = |point, visit, host, fault| Planned { when: When::Point(point, visit), host: Some(host), fault };
    cluster.world.plan(at("record.checked", 4, zombie, Fault::PauseHost { for_ns: 40_000_000 }));
    cluster.world.plan(at("record.sealing", 1, successor, Fault::PauseThread { for_ns: 80_000_000 }));
    let config = cluster.host_config.clone();
    cluster.world.spawn(zombie, "zombie", move |env| {
        let objects = Objects::new(&join(&env, &config)?);
        let offset = env.lines().layout().data_offset();
        // Both belong in the last of the three cells.
        objects.put(b"b", offset, 0, 500_000)?;
        objects.put(b"f", offset, 0, 500_000)?;
        objects.destroy(b"b", 500_000)?;
        match objects.destroy(b"f", 500_000) {
            Err(Error::Fenced { .. }) => Ok(()),
            other => other.map(|()| env.fail("the zombie was not fenced: nothing was tested")),
        }
    });
    let config = cluster.host_config.clone();
    cluster.world.spawn(successor, "successor", move |env| {
        let host = join(&env, &config)?;
        while env.view(|view| view.visits("objects.clearing")) == 0 {
            env.platform().sleep_ns(100_000);
        }
        let objects = Objects::new(&host);
        match objects.put(b"f", env.lines().layout().data_offset(), 0, 500_000) {
            Ok(()) | Err(Error::Exists(_)) => {}
            Err(error) => return Err(error),
        }
        objects.get(b"f", 500_000).map(|_| ())
    });
    let stats = cluster.world.run()?;
    let report = fsck::check(&cluster.world.inspector(), &[]).map_err(|error| cluster.world.failure(error.to_string()))?;
    match report.findings.iter().find(|finding| finding.rule.starts_with("object.")) {
        Some(finding) => Err(cluster.world.failure(format!("{finding:?}"))),
        None => Ok(stats),
    }
}
