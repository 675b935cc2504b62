// SPDX-License-Identifier: Apache-2.0

use super::*;

fn bytes(descriptor: &Descriptor) -> [u8; 64] {
    bytemuck::cast(*descriptor)
}

#[test]
fn a_move_has_every_field_in_its_place() {
    let completion = Completion::default();
    let at = std::ptr::from_ref(&completion) as u64;
    assert!(at.is_multiple_of(32));
    let found = bytes(
        &Descriptor::memory_move(0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00, 0x0001_0203, Target::Memory, false).answered_at(&completion),
    );
    let mut expected = [0u8; 64];
    expected[4..8].copy_from_slice(&[0x0c, 0x00, 0x00, 0x03]);
    expected[8..16].copy_from_slice(&at.to_le_bytes());
    expected[16..24].copy_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
    expected[24..32].copy_from_slice(&[0x00, 0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99]);
    expected[32..36].copy_from_slice(&[0x03, 0x02, 0x01, 0x00]);
    assert_eq!(found, expected);
    let flags = |target, block| bytes(&Descriptor::memory_move(0, 0, 1, target, block))[4..8].to_vec();
    assert_eq!(flags(Target::Memory, true), [0x0e, 0x00, 0x00, 0x03]);
    assert_eq!(flags(Target::Cache, false), [0x0c, 0x01, 0x00, 0x03]);
    assert_eq!(flags(Target::Cache, true), [0x0e, 0x01, 0x00, 0x03]);
}

#[test]
fn a_batch_names_its_list() {
    let list = [Descriptor::memory_move(1, 2, 3, Target::Memory, false); 5];
    assert!((list.as_ptr() as u64).is_multiple_of(64));
    let found = bytes(&Descriptor::batch(&list));
    assert_eq!(found[4..8], [0x0c, 0x00, 0x00, 0x01]);
    assert_eq!(found[16..24], (list.as_ptr() as u64).to_le_bytes());
    assert_eq!(found[32..36], [5, 0, 0, 0]);
    assert!(found[24..32].iter().chain(&found[36..]).all(|&byte| byte == 0));
}

#[test]
fn every_status_is_read_as_what_it_is() {
    let answer = |bytes: [u8; 16]| {
        let word = |at: usize| AtomicU64::new(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
        Completion([word(0), word(8), AtomicU64::new(0), AtomicU64::new(0)]).answer()
    };
    let record = |status: u8| [status, 0, 0, 0, 0x00, 0x10, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(answer(record(0)), Answer::Pending);
    assert_eq!(answer(record(1)), Answer::Done);
    let fault = |is_write| Answer::PageFault { address: 0x0807_0605_0403_0201, is_write, done_bytes: 0x1000 };
    assert_eq!(answer(record(3)), fault(false));
    assert_eq!(answer(record(0x83)), fault(true));
    // Success with a predicate that is false, a failed batch, bad flags, overlap, hardware errors.
    for status in [2, 5, 6, 0x10, 0x11, 0x13, 0x16, 0x1e, 0x7f] {
        assert_eq!(answer(record(status)), Answer::Failed { status });
    }
}
