// SPDX-License-Identifier: Apache-2.0
//! Tests of `scratch`.
use super::*;
use cxl_pool::device::PoolSpec;
use cxl_pool::pool::{FormatOptions, Pool};
use std::path::PathBuf;

fn pool(devices: usize) -> (tempfile::TempDir, Vec<PathBuf>) {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let paths: Vec<PathBuf> = (0..devices).map(|index| directory.path().join(format!("d{index}"))).collect();
    let spec = PoolSpec::new(paths.clone(), Some(24 << 20)).unwrap();
    drop(Pool::format(&spec, &FormatOptions::default()).unwrap());
    (directory, paths)
}

#[test]
fn a_region_never_covers_header_or_metadata() {
    for devices in [1, 2] {
        let (_directory, paths) = pool(devices);
        for (index, path) in paths.iter().enumerate() {
            let before = std::fs::read(path).unwrap();
            // The metadata of these pools fill less than a stripe, which lies on the first device.
            for offset in [0, 4096, DEVICE_HEADER_BYTES].into_iter().take(if index == 0 { 3 } else { 2 }) {
                let error =
                    Scratch::region(&DevicePart::whole(path), offset, MIN_SCRATCH_BYTES, &Sysfs::default()).err().unwrap().to_string();
                assert!(error.contains("metadata"), "{error}");
            }
            let free = Scratch::region(&DevicePart::whole(path), 12 << 20, MIN_SCRATCH_BYTES, &Sysfs::default()).unwrap();
            assert_eq!(free.memory(&CoherenceOptions::default()).unwrap().memory.len_bytes(), MIN_SCRATCH_BYTES);
            assert_eq!(std::fs::read(path).unwrap(), before);
        }
        // Devices that take part in a pool at all are still one pool afterwards.
        Pool::open(&PoolSpec::new(paths, None).unwrap(), &Default::default()).unwrap();
    }
}

#[test]
fn a_region_lies_within_its_device() {
    let (_directory, paths) = pool(1);
    for offset in [17 << 20, u64::MAX - 4095] {
        assert!(Scratch::region(&DevicePart::whole(&paths[0]), offset, MIN_SCRATCH_BYTES, &Sysfs::default()).is_err());
    }
    assert!(Scratch::region(&DevicePart::whole(&paths[0]), 12 << 20, 4096, &Sysfs::default()).is_err());
}

#[test]
fn a_scratch_file_stands_beside_the_device_and_goes() {
    let (directory, paths) = pool(1);
    let scratch = Scratch::beside(&DevicePart::whole(&paths[0]), None, MIN_SCRATCH_BYTES, false, &Sysfs::default()).unwrap().unwrap();
    assert_eq!(scratch.part().path.parent(), Some(directory.path()));
    assert_ne!(scratch.part().path, paths[0]);
    let path = scratch.part().path.clone();
    drop(scratch);
    assert!(!path.exists());
}
