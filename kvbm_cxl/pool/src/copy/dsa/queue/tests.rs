// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::fs;

fn queue(sys: &Path, name: &str, attributes: &[(&str, &str)]) {
    let folder = sys.join("bus/dsa/devices").join(name);
    fs::create_dir_all(&folder).unwrap();
    let all = [("state", "enabled"), ("type", "user"), ("mode", "shared"), ("size", "16"), ("max_transfer_size", "2097152")];
    for (attribute, text) in all.iter().chain(attributes) {
        fs::write(folder.join(attribute), format!("{text}\n")).unwrap();
    }
}

#[test]
fn enabled_user_queues_are_found_and_others_are_not() {
    let root = tempfile::tempdir().unwrap();
    let (sys, dev) = (root.path(), Path::new("/dev"));
    assert_eq!(discover(sys, dev), []);
    queue(sys, "wq0.1", &[("mode", "dedicated"), ("size", "8"), ("max_batch_size", "32"), ("block_on_fault", "1")]);
    queue(sys, "wq0.0", &[]);
    queue(sys, "wq1.0", &[("state", "disabled")]);
    queue(sys, "wq1.1", &[("type", "kernel")]);
    queue(sys, "wq1.2", &[("mode", "other")]);
    queue(sys, "wq1.3", &[("size", "many")]);
    queue(sys, "wq1.4", &[("size", "0")]);
    queue(sys, "wq1.5", &[("max_transfer_size", "64")]);
    queue(sys, "dsa0", &[]);
    queue(sys, "engine0.0", &[]);
    let limits = |in_flight, batch_len, block_on_fault| Limits { transfer_bytes: 2 << 20, batch_len, in_flight, block_on_fault };
    let expected = [
        UsableQueue { path: "/dev/dsa/wq0.0".into(), limits: limits(16, 0, false), is_shared: true },
        UsableQueue { path: "/dev/dsa/wq0.1".into(), limits: limits(8, 32, true), is_shared: false },
    ];
    assert_eq!(discover(sys, dev), expected);
}

#[test]
fn a_queue_that_cannot_be_opened_is_an_error() {
    let limits = Limits { transfer_bytes: 4096, batch_len: 0, in_flight: 1, block_on_fault: false };
    for is_shared in [true, false] {
        let found = UsableQueue { path: "/dev/dsa/wq99.99".into(), limits, is_shared };
        assert!(HardwareQueue::open(&found).is_err());
    }
}
