// SPDX-License-Identifier: Apache-2.0
//! The model by hand: what misses, what a miss brings, who waits how long.
use super::*;

const SPEC: Spec = Spec { cache_pages: 4, read_ns: 1000, write_ns: 5000, degree: 0, ways: 2, buffers: 2 };

fn inside(spec: Spec) -> Inside {
    Inside::new(spec, 16)
}

#[test]
fn a_page_misses_once_and_the_one_used_longest_ago_leaves() {
    let mut device = inside(SPEC);
    assert_eq!(device.access(0, 0, false), 1000);
    assert_eq!(device.access(0, 5000, false), 1000);
    for page in 1..4 {
        device.access(page, 10_000 * u64::from(page), false);
    }
    device.access(0, 50_000, false);
    assert_eq!(device.done.misses, 4);
    // 1 leaves, not 0.
    device.access(4, 60_000, false);
    assert_eq!(device.access(0, 70_000, false), 1000);
    assert_eq!(device.access(1, 70_000, false), 71_000);
    assert_eq!((device.done.misses, device.done.reads, device.cached), (6, 6, 4));
}

#[test]
fn a_miss_brings_the_next_pages_on_the_ways_that_are_free() {
    let mut device = inside(Spec { degree: 2, ways: 8, ..SPEC });
    assert_eq!(device.access(3, 0, false), 1000);
    assert_eq!((device.access(4, 1000, false), device.access(5, 1000, false)), (1000, 1000));
    assert_eq!((device.done.misses, device.done.reads), (1, 3));
    // With two ways the third page waits for a free way; no page follows the last one.
    let mut device = inside(Spec { degree: 2, ..SPEC });
    assert_eq!((device.access(3, 0, false), device.access(5, 0, false)), (1000, 2000));
    let mut device = inside(Spec { degree: 2, ..SPEC });
    assert_eq!((device.access(14, 0, false), device.done.reads), (1000, 2));
}

#[test]
fn what_was_written_goes_back_to_flash_when_it_leaves() {
    let mut device = inside(Spec { cache_pages: 1, ways: 1, ..SPEC });
    assert_eq!(device.access(0, 0, true), 0);
    // The way reads the new page, then writes the page that leaves; the next read waits for both.
    assert_eq!(device.access(1, 0, false), 1000);
    assert_eq!(device.access(2, 0, false), 7000);
}

#[test]
fn prefetches_go_out_as_buffers_are_free_and_hold_no_copy_up() {
    let mut device = inside(Spec { ways: 8, ..SPEC });
    device.asked.extend([(0, 0), (1, 0), (2, 0), (3, 500)]);
    device.go_on(100);
    assert_eq!((device.asked.len(), device.done.reads), (2, 2));
    // A copy fetches a page whose prefetch was not issued yet; that prefetch then finds the page.
    assert_eq!(device.access(3, 200, false), 1200);
    assert_eq!((device.access(0, 1000, false), device.access(1, 1000, false)), (1000, 1000));
    assert_eq!(device.access(2, 1100, false), 2000);
    assert_eq!((device.done.misses, device.done.asked, device.done.reads), (2, 3, 4));
    device.go_on(5000);
    assert_eq!((device.asked.len(), device.done.reads), (0, 4));
}
