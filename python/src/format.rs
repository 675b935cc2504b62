// SPDX-License-Identifier: Apache-2.0
//! Making pools, and reading one without joining it.

use crate::failure::{Failure, Outcome, invalid};
use cxl_pool::device::{PoolSpec, parse_size};
use cxl_pool::media::{CoherenceMode, uuid_text};
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Pool, Share};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Part of the pool that cells take where no share is given, in hundredths.
const DEFAULT_PERCENT: u32 = 75;

pub fn spec_of(text: Option<&str>) -> Outcome<PoolSpec> {
    Ok(text.map_or_else(PoolSpec::from_env, PoolSpec::parse)?)
}

/// Areas of cells: `64K:20%,1M:55%`, a size alone, or `none`.
fn areas_of(text: &str) -> Outcome<Vec<CellArea>> {
    let text = text.trim();
    if text == "none" {
        return Ok(Vec::new());
    }
    let items: Vec<&str> = text.split(',').map(str::trim).collect();
    let area = |item: &&str| {
        let (size, share) = item.split_once(':').map_or((*item, None), |(size, share)| (size, Some(share)));
        let share = match share.map(|share| (share, share.strip_suffix('%'))) {
            None if items.len() > 1 => return Err(Failure::invalid(format!("{item:?}: give each of several cells its share, as 64K:20%"))),
            None => Share::Percent(DEFAULT_PERCENT),
            Some((bytes, None)) => Share::Bytes(parse_size(bytes)?),
            Some((_, Some(percent))) => match percent.parse() {
                Ok(percent @ 1..=100) => Share::Percent(percent),
                _ => return Err(Failure::invalid(format!("{percent:?} is no share in hundredths: 1% to 100%"))),
            },
        };
        Ok(CellArea { cell_bytes: parse_size(size)?, share })
    };
    let mut areas = items.iter().map(area).collect::<Outcome<Vec<_>>>()?;
    areas.sort_by_key(|area| area.cell_bytes);
    Ok(areas)
}

pub fn coherence_text(mode: CoherenceMode) -> &'static str {
    match mode {
        CoherenceMode::Software => "software",
        CoherenceMode::Hardware => "hardware",
    }
}

#[pyfunction]
#[pyo3(signature = (spec, *, cells="1M:75%", coherence="software", force=false, evict_hosts=false))]
pub fn format_pool(py: Python<'_>, spec: &str, cells: &str, coherence: &str, force: bool, evict_hosts: bool) -> PyResult<()> {
    let coherence = match coherence {
        "software" => CoherenceMode::Software,
        "hardware" => CoherenceMode::Hardware,
        other => return Err(invalid(format!("coherence {other:?} does not exist: \"software\" or \"hardware\""))),
    };
    py.detach(|| -> Outcome<()> {
        let options =
            FormatOptions { cells: areas_of(cells)?, coherence, force: force || evict_hosts, evict_hosts, ..FormatOptions::default() };
        Pool::format(&spec_of(Some(spec))?, &options)?;
        Ok(())
    })?;
    Ok(())
}

pub fn cell_bytes(pool: &Pool) -> Vec<u64> {
    let classes = pool.layout().geometry().cells;
    classes.iter().take_while(|class| class.chunks > 0).map(|class| class.cell_bytes).collect()
}

/// What a pool was formatted with.
#[pyfunction]
#[pyo3(signature = (spec=None))]
pub fn pool_info<'py>(py: Python<'py>, spec: Option<&str>) -> PyResult<Bound<'py, PyDict>> {
    let pool = py.detach(|| -> Outcome<Pool> {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        Ok(Pool::open(&spec_of(spec)?, &options)?)
    })?;
    let (layout, superblock) = (pool.layout(), pool.superblock());
    let geometry = layout.geometry();
    let info = PyDict::new(py);
    info.set_item("uuid", uuid_text(superblock.uuid()))?;
    info.set_item("incarnation", superblock.incarnation())?;
    info.set_item("coherence", coherence_text(superblock.coherence()))?;
    info.set_item("memory", pool.description())?;
    info.set_item("len_bytes", geometry.len_bytes)?;
    info.set_item("data_bytes", layout.chunks() * geometry.chunk_bytes)?;
    info.set_item("metadata_bytes", geometry.metadata_bytes)?;
    info.set_item("chunk_bytes", geometry.chunk_bytes)?;
    info.set_item("slots", geometry.slots)?;
    info.set_item("locks", geometry.locks)?;
    info.set_item("objects", geometry.objects)?;
    let cells = PyList::empty(py);
    for class in geometry.cells.iter().take_while(|class| class.chunks > 0) {
        let entry = PyDict::new(py);
        entry.set_item("cell_bytes", class.cell_bytes)?;
        entry.set_item("count", class.chunks * u64::from(geometry.cells_per_chunk))?;
        cells.append(entry)?;
    }
    info.set_item("cells", cells)?;
    let devices = PyList::empty(py);
    for device in pool.devices() {
        let entry = PyDict::new(py);
        entry.set_item("name", &device.name)?;
        entry.set_item("offset_bytes", device.offset_bytes)?;
        entry.set_item("len_bytes", device.len_bytes)?;
        entry.set_item("numa_node", device.numa_node)?;
        devices.append(entry)?;
    }
    info.set_item("devices", devices)?;
    Ok(info)
}
