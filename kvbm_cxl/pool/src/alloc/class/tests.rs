// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn sizes_rise_in_lines_and_end_with_the_chunk() {
    for chunk_bytes in [4096, 1 << 16, 2 << 20, 1 << 30] {
        let classes = Classes::new(chunk_bytes);
        let sizes = &classes.sizes;
        assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(sizes.iter().all(|size| size % MIN_BLOCK_BYTES == 0));
        assert_eq!((sizes[0], *sizes.last().unwrap()), (64, chunk_bytes));
    }
    assert_eq!(Classes::new(4096).sizes, [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096]);
}

#[test]
fn the_smallest_class_that_holds_is_chosen() {
    let classes = Classes::new(2 << 20);
    for len_bytes in (1..=200_000).step_by(37).chain([1, 64, 65, 2 << 20]) {
        let class = classes.holding(len_bytes).unwrap();
        assert!(classes.bytes(class) >= len_bytes);
        assert!(class == 0 || classes.bytes(class - 1) < len_bytes);
        assert_eq!(classes.exactly(classes.bytes(class)), Some(class));
    }
    assert_eq!(classes.holding((2 << 20) + 1), None);
    assert_eq!(classes.exactly(100), None);
}
