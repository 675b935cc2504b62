// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn an_entry_of_the_location_cache_is_of_its_key_alone() {
    let cache = LocationCache::new(64, 64);
    let home = |fingerprint| Home::of(fingerprint);
    let (one, other) = (home(0x1111_2222_3333_4441), home(0x5111_2222_3333_4441));
    assert_eq!(cache.get(&one), None);
    cache.put(&one, u64::from(u32::MAX));
    assert_eq!((cache.get(&one), cache.get(&other)), (Some(u32::MAX.into()), None));
    cache.put(&other, 0);
    assert_eq!((cache.get(&one), cache.get(&other)), (None, Some(0)));
}
