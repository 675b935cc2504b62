// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::media::{Geometry, Record};
use bytemuck::Zeroable;

#[test]
fn a_large_pool_has_names_for_2048_engines_by_default() {
    assert_eq!([64 << 10, 64 << 20, 1 << 30, 2 << 30, 1 << 40].map(Geometry::default_objects), [256, 256, 4096, 8192, 8192]);
    let layout = layout(Geometry::default_objects(2 << 30));
    let mut taken = std::collections::HashSet::new();
    let mut engines = 0;
    // As the plugin names them.
    for number in 1..=2048u64 {
        let name = format!("nixl.{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        engines += usize::from(probes(name.as_bytes(), &layout).any(|cell| taken.insert(cell)));
    }
    assert_eq!(engines, 2048);
}

fn layout(objects: u32) -> Layout {
    Layout::new(Geometry { objects, ..Geometry::with_len(64 << 20) }).unwrap()
}

fn cell(data: [u8; RECORD_BYTES]) -> Best {
    Best { number: 9, slot: 1, copy: Record { grant: 1, version: 1, data, ..Record::zeroed() } }
}

#[test]
fn probes_stay_inside_the_table_and_visit_no_cell_twice() {
    for objects in [1, 3, 16, 17, 256] {
        let layout = layout(objects);
        let records = Structure::Objects.records(layout.geometry());
        for name in 0..200u32 {
            let visited: Vec<u64> = probes(&name.to_le_bytes(), &layout).collect();
            assert_eq!(visited.len(), OBJECT_PROBES.min(objects as usize));
            assert!(visited.iter().all(|number| records.contains(number)));
            assert_eq!(visited.iter().collect::<std::collections::HashSet<_>>().len(), visited.len());
        }
    }
}

#[test]
fn a_value_survives_its_record() {
    let layout = layout(256);
    let offset = layout.data_offset() + 4096;
    let value = open(&cell(compose(b"index", offset, 77, false)), &layout).unwrap();
    assert!(is_named(&value, b"index") && !is_named(&value, b"inde"));
    assert_eq!(object(&value), Object { name: b"index".to_vec(), offset, len_bytes: 77, is_listener: false });
    let longest = [7u8; MAX_OBJECT_NAME_BYTES];
    let value = open(&cell(compose(&longest, offset, 0, true)), &layout).unwrap();
    assert!(is_named(&value, &longest) && object(&value).is_listener);
    let later = ObjectValue { kind: 2, ..value };
    assert!(!object(&open(&cell(bytemuck::cast(later)), &layout).unwrap()).is_listener, "a kind that only later builds know");
}

#[test]
fn hostile_values_are_refused() {
    let layout = layout(256);
    let good = ObjectValue { offset: layout.data_offset(), state: ObjectValue::LIVE, name_len: 1, ..ObjectValue::default() };
    assert!(open(&cell(bytemuck::cast(good)), &layout).is_ok());
    for bad in [
        ObjectValue { state: 3, ..good },
        ObjectValue { name_len: 0, ..good },
        ObjectValue { name_len: MAX_OBJECT_NAME_BYTES as u8 + 1, ..good },
        ObjectValue { offset: 64, ..good },
        ObjectValue { offset: u64::MAX, ..good },
        ObjectValue { offset: layout.chunk_offset(layout.chunks() - 1).unwrap(), len_bytes: u32::MAX, ..good },
    ] {
        assert!(open(&cell(bytemuck::cast(bad)), &layout).is_err(), "{bad:?}");
    }
}
