// SPDX-License-Identifier: Apache-2.0
//! `cxlctl info`.

use crate::output::{Exit, Failure, Out};
use crate::text::{bytes, safe, table};
use cxl_pool::alloc::{AllocAudit, audit};
use cxl_pool::device::DeviceKind;
use cxl_pool::media::{CoherenceMode, Geometry, HINTS_PER_LINE, uuid_text};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::Pool;
use serde_json::{Value, json};

pub fn run(pool: Option<&str>, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, true)?;
    let usage = audit(pool.lines()).map_err(|error| error.to_string());
    out.answer(|| json(&pool, Some(&usage)), || text(&pool, Some(&usage)))?;
    Ok(Exit::Done)
}

/// The usage, or why it is unknown.
pub type Usage = Result<AllocAudit, String>;

fn kind(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Devdax => "devdax",
        DeviceKind::Hugetlb => "hugetlb",
        DeviceKind::File => "file",
    }
}

fn coherence(mode: CoherenceMode) -> &'static str {
    match mode {
        CoherenceMode::Software => "software",
        CoherenceMode::Hardware => "hardware",
    }
}

/// A seat's machine in the superblock.
pub fn machine(id: MachineId) -> Option<String> {
    (!id.is_none()).then(|| id.to_string())
}

pub fn json(pool: &Pool, usage: Option<&Usage>) -> Value {
    let (superblock, geometry) = (pool.superblock(), *pool.layout().geometry());
    let [compat, ro_compat, incompat] = superblock.features();
    let devices = pool.devices().iter().zip(superblock.devices()).map(|(device, record)| {
        json!({"name": device.name, "kind": kind(device.kind), "offset_bytes": device.offset_bytes,
            "len_bytes": device.len_bytes, "align_bytes": device.align_bytes,
            "numa_node": device.numa_node, "id": MachineId(record.id).to_string(), "formatted_as": record.name})
    });
    let regions = pool
        .layout()
        .spans()
        .iter()
        .map(|span| json!({"region": format!("{:?}", span.region), "offset": span.offset, "lines": span.lines}));
    let mut value = json!({
        "uuid": uuid_text(superblock.uuid()),
        "incarnation": format!("{:#x}", superblock.incarnation()),
        "version": format!("{}.{}", superblock.version().0, superblock.version().1),
        "features": {"compat": compat, "ro_compat": ro_compat, "incompat": incompat},
        "coherence": coherence(superblock.coherence()),
        "memory": pool.description(),
        "geometry": {"len_bytes": geometry.len_bytes, "devices": geometry.devices,
            "metadata_bytes": geometry.metadata_bytes, "stripe_bytes": geometry.stripe_bytes,
            "seats": geometry.all_seats(), "slots": geometry.slots, "locks": geometry.locks, "objects": geometry.objects,
            "chunk_bytes": geometry.chunk_bytes, "chunks": pool.layout().chunks(), "data_offset": pool.layout().data_offset()},
        "cache": {"cells": geometry.cell_count(), "cells_bytes": geometry.cells_len_bytes(), "cells_offset": pool.layout().cells_offset(),
            "cells_per_chunk": geometry.cells_per_chunk, "cell_chunks": geometry.cell_chunks(), "stripes": geometry.stripes,
            "hint_lines_per_stripe": geometry.hint_lines_per_stripe(), "hinted_before_eviction": hinted_before_eviction(&geometry),
            "classes": classes(&geometry).collect::<Vec<_>>()},
        "seat_machines": superblock.seats().into_iter().map(machine).collect::<Vec<_>>(),
        "devices": devices.collect::<Vec<_>>(),
        "layout": regions.collect::<Vec<_>>(),
    });
    match usage {
        Some(Ok(audit)) => {
            value["usage"] = json!({"chunks": audit.chunks, "owned_chunks": audit.owned, "free_chunks": audit.free,
                "waiting_chunks": audit.waiting, "kept_blocks": audit.kept_blocks, "kept_bytes": audit.kept_bytes});
        }
        Some(Err(reason)) => value["usage"] = json!({"unknown": reason}),
        None => {}
    }
    value
}

fn classes(geometry: &Geometry) -> impl Iterator<Item = Value> + '_ {
    geometry.cells.iter().take_while(|class| class.chunks > 0).map(|class| {
        let bytes = class.chunks * u64::from(geometry.cells_per_chunk) * class.cell_bytes;
        json!({"cell_bytes": class.cell_bytes, "chunks": class.chunks, "cells": class.chunks * u64::from(geometry.cells_per_chunk),
            "bytes": bytes, "share_percent": share(bytes, geometry)})
    })
}

/// Part of the pool, in hundredths.
fn share(bytes: u64, geometry: &Geometry) -> f64 {
    (bytes as f64 / geometry.len_bytes.max(1) as f64 * 1000.0).round() / 10.0
}

/// How many blocks have room for their hints, about, before the first one goes because the window of a new one is full. In a table of
/// `hints` places that is filled to the part `f`, of random keys one in exp(9.3 - 36 (f - 1/2)) meets a full window of 32 places, which
/// makes one such key up to here.
fn hinted_before_eviction(geometry: &Geometry) -> u64 {
    let hints = (u64::from(geometry.stripes) * geometry.hint_lines_per_stripe() * HINTS_PER_LINE as u64) as f64;
    let filled = 0.5 + (9.3 - (hints / 36.0).max(1.0).ln()) / 36.0;
    ((hints * filled.clamp(0.0, 1.0)) as u64).min(geometry.cell_count())
}

fn cells_text(geometry: &Geometry) -> String {
    if geometry.cell_chunks() == 0 {
        return "cache\n  none: formatted without cells\n".into();
    }
    let mut text = format!(
        "cache ({} cells in chunks of {}, hint table of {} stripes with {} hints each: about {} blocks before \
         one goes for the hint of another)\n",
        geometry.cell_count(),
        geometry.cells_per_chunk,
        geometry.stripes,
        geometry.hint_lines_per_stripe() * HINTS_PER_LINE as u64,
        hinted_before_eviction(geometry)
    );
    let mut rows = vec![["  cell", "cells", "chunks", "size", "of the pool"].map(String::from).to_vec()];
    for class in geometry.cells.iter().take_while(|class| class.chunks > 0) {
        let cells = class.chunks * u64::from(geometry.cells_per_chunk);
        let len_bytes = cells * class.cell_bytes;
        rows.push(vec![
            format!("  {}", bytes(class.cell_bytes)),
            cells.to_string(),
            class.chunks.to_string(),
            bytes(len_bytes),
            format!("{} %", share(len_bytes, geometry)),
        ]);
    }
    text.push_str(&table(&rows));
    text
}

pub fn text(pool: &Pool, usage: Option<&Usage>) -> String {
    let (superblock, geometry, layout) = (pool.superblock(), *pool.layout().geometry(), pool.layout());
    let [compat, ro_compat, incompat] = superblock.features();
    let (major, minor) = superblock.version();
    let mut text = format!(
        "pool {}\n  incarnation {:#x}, format {major}.{minor}\n  \
         features: compat {compat:#x}, ro-compat {ro_compat:#x}, incompat {incompat:#x}\n  \
         {}, {} chunks of {}, coherence {}, reached with {}\n  {} slots, {} seats, {} locks, {} object cells\n",
        uuid_text(superblock.uuid()),
        superblock.incarnation(),
        bytes(geometry.len_bytes),
        layout.chunks(),
        bytes(geometry.chunk_bytes),
        coherence(superblock.coherence()),
        pool.description(),
        geometry.slots,
        geometry.all_seats(),
        geometry.locks,
        geometry.objects,
    );
    for (seat, id) in superblock.seats().into_iter().enumerate() {
        let owner = machine(id).unwrap_or_else(|| "given out as machines join".into());
        text.push_str(&format!("  seat {seat}: {owner}\n"));
    }
    let apart = match geometry.metadata_bytes {
        0 => String::new(),
        apart => format!("; {} of device 0 for the metadata alone", bytes(apart)),
    };
    text.push_str(&format!("devices (stripe {}{apart})\n", bytes(geometry.stripe_bytes)));
    let mut rows = vec![["  #", "kind", "size", "node", "name"].map(String::from).to_vec()];
    for (index, device) in pool.devices().iter().enumerate() {
        let node = device.numa_node.map_or("-".into(), |node| node.to_string());
        rows.push(vec![format!("  {index}"), kind(device.kind).into(), bytes(device.len_bytes), node, safe(&device.label())]);
    }
    text.push_str(&table(&rows));
    text.push_str(&cells_text(&geometry));
    text.push_str("layout\n");
    let mut rows = vec![["  region", "offset", "lines", "size"].map(String::from).to_vec()];
    for span in layout.spans() {
        rows.push(vec![format!("  {:?}", span.region), format!("{:#x}", span.offset), span.lines.to_string(), bytes(span.lines * 64)]);
    }
    if geometry.cell_chunks() > 0 {
        let (offset, size) = (format!("{:#x}", layout.cells_offset()), bytes(geometry.cells_len_bytes()));
        rows.push(vec!["  cells".into(), offset, geometry.cell_count().to_string(), size]);
    }
    rows.push(vec![
        "  chunks".into(),
        format!("{:#x}", layout.data_offset()),
        String::new(),
        bytes(layout.chunks() * geometry.chunk_bytes),
    ]);
    text.push_str(&table(&rows));
    match usage {
        Some(Ok(audit)) => text.push_str(&format!(
            "usage\n  {} chunks owned, {} free, {} wait for the proof of a host's death; {} kept blocks, {}\n",
            audit.owned,
            audit.free,
            audit.waiting,
            audit.kept_blocks,
            bytes(audit.kept_bytes)
        )),
        Some(Err(reason)) => text.push_str(&format!("usage\n  unknown: {reason}\n")),
        None => {}
    }
    text
}

#[cfg(test)]
mod tests;
