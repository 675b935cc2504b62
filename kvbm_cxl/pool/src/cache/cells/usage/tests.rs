// SPDX-License-Identifier: Apache-2.0

use super::*;

const OURS: [u8; 16] = [9; 16];

#[test]
fn promises_alone_have_to_fit_and_count_with_what_is_there() {
    let mut usage = NamespaceUsage::default();
    assert!(usage.promise(&OURS, 128, 256) && usage.promise(&OURS, 128, 256) && !usage.promise(&OURS, 128, 256));
    assert!(!usage.promise(&[8; 16], 1, 0));
    assert_eq!((usage.excess(&OURS, 200).bytes, usage.shares().len()), (56, 0));
    usage.end_promise(&OURS, 128);
    usage.add(OURS, 128);
    assert!(usage.promise(&OURS, 128, 256), "a block can make way");
    assert_eq!((usage.excess(&OURS, 256).bytes, usage.share(&OURS)), (128, Share { blocks: 1, cell_bytes: 128 }));
    usage.is_going(&OURS);
    assert_eq!(usage.excess(&OURS, 256), Excess { bytes: 128, are_going: true, settled: 0 });
    usage.settle(&OURS, 128);
    assert_eq!(usage.excess(&OURS, 256), Excess { bytes: 0, are_going: false, settled: 1 });
    (0..2).for_each(|_| usage.end_promise(&OURS, 128));
    assert!(usage.of.is_empty(), "nothing is known of who has nothing");
}
