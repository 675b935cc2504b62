// SPDX-License-Identifier: Apache-2.0
//! A host unbinds the name in the first cell of the object table and with it clears the last cell, and does not get through.
//!
//! By seed it stops before it writes either and resumes while its successor seals the two, so that what the successor reads of them,
//! one after the other, never was in the memory at one time; or it dies between the two. Checked: a name lies in one cell, which its lookup
//! reaches, and one that was found unbound does not come back.

use super::setup::{Cluster, join};
use crate::{Chances, Env, Failure, Fault, Planned, Stats, When, WritePath};
use cxl_pool::host::HostConfig;
use cxl_pool::objects::Objects;
use cxl_pool::{Error, Result, fsck};

/// Longer than any run.
const LONG_MS: u64 = 500_000;

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
    let dies = seed % 2 == 1;
    if dies {
        cluster.world.plan(at("record.published", 4, zombie, Fault::CrashProcess { restart_after_ns: None }));
    } else {
        cluster.world.plan(at("record.checked", 4, zombie, Fault::PauseHost { for_ns: 40_000_000 }));
        cluster.world.plan(at("record.sealing", 1, successor, Fault::PauseThread { for_ns: 80_000_000 }));
    }
    let config = cluster.host_config.clone();
    cluster.world.spawn(zombie, "zombie", move |env| unbind(&env, &config));
    let config = cluster.host_config.clone();
    cluster.world.spawn(successor, "successor", move |env| if dies { watch(&env, &config) } else { bind(&env, &config) });
    let stats = cluster.world.run()?;
    if !stats.points.contains_key("record.sealed") {
        return Err(cluster.world.failure("no host sealed: nothing was tested"));
    }
    let report = fsck::check(&cluster.world.inspector(), &[]).map_err(|error| cluster.world.failure(error.to_string()))?;
    match report.findings.iter().find(|finding| finding.rule.starts_with("object.")) {
        Some(finding) => Err(cluster.world.failure(format!("{finding:?}"))),
        None => Ok(stats),
    }
}

fn unbind(env: &Env, config: &HostConfig) -> Result<()> {
    let objects = Objects::new(&join(env, config)?);
    let offset = env.lines().layout().data_offset();
    // Both belong in the last of the three cells.
    objects.put(b"b", offset, 0, LONG_MS)?;
    objects.put(b"f", offset, 0, LONG_MS)?;
    objects.destroy(b"b", LONG_MS)?;
    match objects.destroy(b"f", LONG_MS) {
        Err(Error::Fenced { .. }) => Ok(()),
        other => other.map(|()| env.fail("the zombie was not fenced: nothing was tested")),
    }
}

/// Joins, and waits until the other host is about to unbind.
fn follow(env: &Env, config: &HostConfig) -> Result<Objects> {
    let host = join(env, config)?;
    while env.view(|view| view.visits("objects.clearing")) == 0 {
        env.platform().sleep_ns(100_000);
    }
    Ok(Objects::new(&host))
}

fn bind(env: &Env, config: &HostConfig) -> Result<()> {
    let objects = follow(env, config)?;
    match objects.put(b"f", env.lines().layout().data_offset(), 0, LONG_MS) {
        Ok(()) | Err(Error::Exists(_)) => {}
        Err(error) => return Err(error),
    }
    objects.get(b"f", LONG_MS).map(|_| ())
}

fn watch(env: &Env, config: &HostConfig) -> Result<()> {
    let objects = follow(env, config)?;
    let mut was_gone = false;
    let mut look = || match objects.get(b"f", LONG_MS) {
        Ok(object) if was_gone => {
            env.fail(format!("{object:?} was gone and is back"));
            Ok(())
        }
        Ok(_) => Ok(()),
        Err(Error::NotFound(_)) => {
            was_gone = true;
            Ok(())
        }
        Err(error) => Err(error),
    };
    for _ in 0..5 {
        look()?;
        env.platform().sleep_ns(100_000);
    }
    // The next writer repairs. A cell is free, whatever the other host got done.
    objects.put(b"a", env.lines().layout().data_offset(), 0, LONG_MS)?;
    look()
}
