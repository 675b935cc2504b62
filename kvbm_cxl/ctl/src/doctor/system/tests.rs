// SPDX-License-Identifier: Apache-2.0
//! Tests of `system`.
use super::*;

#[test]
fn dax_nodes_tell_what_they_are_bound_to() {
    let root = tempfile::tempdir().unwrap();
    let bus = root.path().join("bus/dax");
    for (name, driver) in [("dax0.0", Some("device_dax")), ("dax1.0", Some("kmem")), ("dax2.0", None)] {
        let device = bus.join("devices").join(name);
        std::fs::create_dir_all(&device).unwrap();
        if let Some(driver) = driver {
            std::os::unix::fs::symlink(format!("../../drivers/{driver}"), device.join("driver")).unwrap();
        }
    }
    let found = dax_devices(root.path());
    let expected = [DaxBinding::DeviceDax, DaxBinding::Other("kmem".into()), DaxBinding::Unbound];
    assert_eq!(found.iter().map(|(_, binding)| binding.clone()).collect::<Vec<_>>(), expected);
    let advice: Vec<_> = found.iter().map(|(name, binding)| binding.advice(name)).collect();
    assert!(advice[0].is_none());
    assert!(advice[1].as_ref().unwrap().contains("kmem") && advice[2].as_ref().unwrap().contains("dax2.0"));
    assert!(dax_devices(Path::new("/nowhere")).is_empty());
}

#[test]
fn this_machine_is_described() {
    assert!(System::look().max_map_count.unwrap() > 0);
    assert!(Cpu::detect().line_bytes > 0);
    assert!(room(Path::new("/nowhere/at/all")).is_none());
}
