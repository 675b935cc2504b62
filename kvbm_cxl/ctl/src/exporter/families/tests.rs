// SPDX-License-Identifier: Apache-2.0
use super::*;
use cxl_pool::device::PoolSpec;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::FormatOptions;

/// Every metric that is rendered is a row of the page, in this order, and the other way round.
#[test]
fn the_page_lists_what_is_exported() {
    let directory = tempfile::tempdir().unwrap();
    let spec = PoolSpec::parse(&format!("{},size=16M", directory.path().join("pool").display())).unwrap();
    let pool = Pool::format(&spec, &FormatOptions { machine: Some(MachineId([7; 16])), ..FormatOptions::default() }).unwrap();
    let mut text = String::new();
    render(&pool, &PoolView::of(&pool).unwrap(), None, &mut text);
    let lines: Vec<&str> = text.lines().collect();
    let rows: Vec<String> = lines
        .windows(2)
        .filter_map(|pair| {
            let (name, help) = pair[0].strip_prefix("# HELP ")?.split_once(' ')?;
            assert_eq!(pair[1].ends_with(" counter"), name.ends_with("_total"), "{name}");
            let labels = match name {
                "cxl_pool_info" => "{uuid,incarnation}",
                "cxl_pool_slots" | "cxl_pool_cells" | "cxl_pool_cell_chunks" => "{state}",
                "cxl_pool_owned_cells" => "{slot,standing,state}",
                "cxl_pool_awaited_bytes" => "{slot}",
                "cxl_pool_host_info" => "{slot,machine,name,state,standing}",
                name if name.starts_with("cxl_pool_seat_") => "{seat}",
                name if name.starts_with("cxl_pool_host_") => "{slot}",
                _ => "",
            };
            Some(format!("- `{name}{labels}`: {help}"))
        })
        .collect();
    assert!(rows.len() > Stat::ALL.len());
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operating/metrics.md")).unwrap();
    let section = page.split_once("\n## What the exporter tells\n").expect("the heading").1.split("\n## ").next().unwrap_or_default();
    let table: Vec<&str> = section.lines().filter(|line| line.starts_with("- `")).collect();
    assert!(table == rows, "docs/operating/metrics.md has to hold these rows:\n{}\n", rows.join("\n"));
}
