// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn binds_to_every_node_there_is_and_says_why_not() {
    let mut bound = 0;
    for node in 0..64 {
        let Ok(cpus) = Sysfs::default().node_cpus(node) else { continue };
        // A thread of its own: the affinity must not leak into other tests.
        let outcome = std::thread::spawn(move || {
            bind_current_thread_to_node(node)?;
            CpuSet::of_current_thread()
        })
        .join()
        .unwrap();
        match outcome {
            Ok(now) => {
                let cpus: Vec<usize> = cpus.numbers().collect();
                assert!(!now.is_empty() && now.numbers().all(|cpu| cpus.contains(&cpu)), "node {node}: {now} not within {cpus:?}");
                bound += 1;
            }
            Err(error) => println!("node {node} skipped: {error}"),
        }
    }
    assert!(bound > 0 || !Path::new("/sys/devices/system/node/node0").exists(), "no node could be bound to");
    assert!(matches!(bind_current_thread_to_node(9999), Err(Error::NotFound(_))));
}

#[test]
fn a_node_without_cpus_is_named_as_such() {
    let root = tempfile::tempdir().unwrap();
    let node = root.path().join("devices/system/node/node7");
    std::fs::create_dir_all(&node).unwrap();
    std::fs::write(node.join("cpulist"), "\n").unwrap();
    let error = Sysfs::at(root.path()).bind_current_thread_to_node(7).unwrap_err().to_string();
    assert!(error.contains("no CPUs"), "{error}");
}

/// A tree with nodes 0 and 1, which have CPUs, and node 2, which has memory alone and lies nearer to node 1.
fn three_nodes() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let here = CpuSet::of_current_thread().unwrap().numbers().next().unwrap();
    for (node, cpus, distance) in [(0, "60000".into(), "10 21 17"), (1, here.to_string(), "21 10 14"), (2, String::new(), "17 14 10")] {
        let folder = root.path().join(format!("devices/system/node/node{node}"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("cpulist"), format!("{cpus}\n")).unwrap();
        std::fs::write(folder.join("distance"), format!("{distance}\n")).unwrap();
    }
    root
}

#[test]
fn a_device_without_cpus_takes_those_nearest_to_it() {
    let root = three_nodes();
    let sysfs = Sysfs::at(root.path());
    assert_eq!([0, 1, 2, 3].map(|node| sysfs.nearest_with_cpus(node)), [Some(0), Some(1), Some(1), None]);
    let binding: CpuBinding = "device".parse().unwrap();
    let near = sysfs.resolve(&binding, Some(2)).unwrap();
    assert_eq!(near, sysfs.resolve(&"node:1".parse().unwrap(), None).unwrap());
    for unknown in [None, Some(7)] {
        assert_eq!(sysfs.resolve(&binding, unknown).unwrap(), CpuBinding::default(), "not known: where the process runs");
    }
}

#[test]
fn what_cannot_be_bound_to_is_refused_with_its_kind() {
    let root = three_nodes();
    let sysfs = Sysfs::at(root.path());
    let refused = |text: &str| sysfs.resolve(&text.parse().unwrap(), Some(0)).unwrap_err();
    assert!(matches!(refused("node:9"), Error::NotFound(_)));
    // A node whose CPUs are not there, one without any, and a list of such.
    for text in ["node:0", "device", "workers=60000", "copy=node:2"] {
        assert!(matches!(refused(text), Error::Invalid(_)), "{text}");
    }
}
