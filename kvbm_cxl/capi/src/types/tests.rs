// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn structures_of_other_versions() {
    let mut longer = [0u64; 16];
    longer[0] = 128;
    longer[1] = 1;
    // SAFETY: 128 bytes, as the first word says; the same below.
    let read_it = |words: &[u64; 16]| unsafe { read(words.as_ptr().cast::<LockInfo>()) };
    assert_eq!(read_it(&longer).unwrap().recovered, 1);
    longer[9] = 1;
    assert!(read_it(&longer).unwrap_err().message.contains("newer library"));
    longer[0] = 12;
    let short = read_it(&longer).unwrap();
    assert_eq!((short.recovered, short.grant), (1, 0));
    for size in [0, 7, 4097, u64::MAX] {
        longer[0] = size;
        assert!(read_it(&longer).unwrap_err().message.contains("struct_size"), "{size}");
    }
}

#[test]
fn only_what_the_caller_has_is_written() {
    let mut words = [u64::MAX; 4];
    words[0] = 12;
    let value = LockInfo { struct_size: 99, recovered: 1, grant: 2 };
    // SAFETY: 32 bytes, of which the first word claims less.
    unsafe { write(words.as_mut_ptr().cast::<LockInfo>(), &value) }.unwrap();
    assert_eq!(words, [12, u64::from(u32::MAX) << 32 | 1, u64::MAX, u64::MAX]);
    words[0] = 24;
    // SAFETY: as above.
    unsafe { write(words.as_mut_ptr().cast::<LockInfo>(), &value) }.unwrap();
    assert_eq!(words, [24, 2 << 32 | 1, 0, u64::MAX]);
    // SAFETY: null is allowed.
    assert!(unsafe { check_writable(std::ptr::null::<Info>()) }.is_err());
}
