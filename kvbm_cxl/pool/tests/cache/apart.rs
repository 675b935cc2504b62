// SPDX-License-Identifier: Apache-2.0
//! Pools whose metadata lies on a device of its own: hosts publish, pull, are killed and come back, and no payload comes to lie there.

use crate::bench::*;
use crate::processes::Process;
use cxl_pool::media::Stripes;

const LEN: usize = 3000;
/// What processes of the child's task publish.
const CHILD_LEN: usize = 1000;

/// How often the first bytes of a block are found in a file of the pool.
fn found_in(bench: &Bench, name: &str, block: &[u8]) -> usize {
    let file = std::fs::read(bench.directory.path().join(name)).unwrap();
    file.chunks_exact(64).filter(|line| **line == block[..64]).count()
}

#[test]
fn hosts_publish_pull_die_and_come_back() {
    for payload in [1, 2] {
        let bench = Bench::apart(payload, &[(4096, 56)]);
        let (one, other) = (bench.member(1), bench.member(2));
        one.publish(0..10, LEN);
        assert_eq!(other.count(0..10, LEN), 10);
        // A host that sees nothing of what is in caches of the others, and one that does; both end in the middle of a block.
        for (life, coherence) in [None, Some("emulated:seed=7"), None, Some("emulated:seed=8")].into_iter().enumerate() {
            let first = 200 + 10 * life as u64;
            Process::start_with(&bench, 3, &format!("publish {first} 4"), coherence).kill();
            for member in [&one, &other] {
                assert_eq!(member.count(first..first + 4, CHILD_LEN), 4, "{payload} devices, life {life}");
                assert!(!member.has(1000, CHILD_LEN), "a block half written");
            }
        }
        // Each block lies once in the payload, and no byte of it beside the metadata.
        for block in (0..10).map(|number| bytes(number, LEN)).chain((200..204).map(|number| bytes(number, CHILD_LEN))) {
            let in_payload: usize = (0..payload).map(|index| found_in(&bench, &format!("pool{index}"), &block)).sum();
            assert_eq!((in_payload, found_in(&bench, "metadata", &block)), (1, 0));
        }
        let geometry = *one.pool.layout().geometry();
        let used = Stripes::of(&geometry).unwrap().device_len_bytes(0);
        let metadata = std::fs::read(bench.directory.path().join("metadata")).unwrap();
        assert!(metadata[used as usize..].iter().all(|&byte| byte == 0), "bytes behind the metadata changed");
        other.leave();
        let again = bench.member(2);
        assert_eq!(again.count(0..10, LEN), 10, "after it was opened again");
        // The blocks of the host that is dead for good come back once its cells have another owner.
        again.serve_until("the cells of the dead host", || again.count(200..204, CHILD_LEN) == 4);
        again.publish(20..24, LEN);
        assert_eq!(one.count(20..24, LEN), 4);
        again.leave();
        one.leave();
    }
}

#[test]
fn a_device_of_metadata_that_goes_is_an_error_and_no_wrong_byte() {
    let bench = Bench::apart(1, &[(4096, 28)]);
    let member = bench.member(1);
    member.publish(0..8, LEN);
    let file = std::fs::File::options().write(true).open(bench.directory.path().join("metadata")).unwrap();
    file.set_len(0).unwrap();
    // A miss or an error that names the device; what is found has the right bytes.
    for number in 0..8 {
        let mut found = vec![0; LEN];
        match member.cache.pull(SPACE, key(number), &mut found) {
            Ok(cxl_pool::cache::Pulled::Hit { .. }) => assert!(found == bytes(number, LEN)),
            Ok(cxl_pool::cache::Pulled::Miss(_)) => {}
            Err(error) => assert!(error.to_string().contains("metadata"), "{error}"),
        }
    }
    assert!(member.cache.publish(SPACE, key(100), None, &bytes(100, LEN)).is_err());
    let payload = std::fs::read(bench.directory.path().join("pool0")).unwrap();
    assert!(payload.chunks_exact(64).any(|line| *line == bytes(0, LEN)[..64]), "the payload is untouched");
}
