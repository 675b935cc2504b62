// SPDX-License-Identifier: Apache-2.0

use super::*;
use proptest::prelude::*;

const HEADER: u64 = DEVICE_HEADER_BYTES;

#[test]
fn one_device_is_linear() {
    let stripes = Stripes::fit(&[HEADER + 12345], 4096).unwrap();
    let pieces: Vec<_> = stripes.pieces().collect();
    assert_eq!(pieces, [Piece { start: 0, len_bytes: HEADER + 12345, device: 0, device_offset: 0 }]);
    assert!(Stripes::fit(&[HEADER], 4096).is_err());
    assert!(Stripes::fit(&[], 4096).is_err());
    assert!(Stripes::fit(&[HEADER, HEADER + 4096], 4096).is_err());
}

#[test]
fn unequal_devices_use_the_common_stripes() {
    let stripes = Stripes::fit(&[HEADER + 5 * 4096, HEADER + 2 * 4096 + 7], 4096).unwrap();
    assert_eq!([stripes.device_len_bytes(0), stripes.device_len_bytes(1)], [HEADER + 2 * 4096; 2]);
    assert_eq!(stripes.len_bytes(), 2 * HEADER + 4 * 4096);
    let places: Vec<_> = stripes.pieces().map(|piece| (piece.device, piece.device_offset)).collect();
    assert_eq!(places, [(0, 0), (1, 0), (0, HEADER), (1, HEADER), (0, HEADER + 4096), (1, HEADER + 4096)]);
}

#[test]
fn a_stripe_that_fits_the_limit_is_found() {
    let sizes = [HEADER + (1 << 40), HEADER + (1 << 40)];
    let stripe = Stripes::stripe_behind(0, &sizes, HEADER, 32765).unwrap();
    assert!(Stripes::fit(&sizes, stripe).unwrap().pieces_len() <= 32765);
    assert!(Stripes::fit(&sizes, stripe / 2).unwrap().pieces_len() > 32765);
    assert_eq!(Stripes::stripe_behind(0, &sizes, HEADER, 2), None);
}

#[test]
fn metadata_apart_lies_on_device_0_and_the_rest_on_the_others() {
    let stripes = Stripes::fit_behind(3 * HEADER, &[HEADER + 2 * 4096, HEADER + 3 * 4096], 4096).unwrap();
    let pieces: Vec<_> = stripes.pieces().map(|piece| (piece.start, piece.len_bytes, piece.device, piece.device_offset)).collect();
    let headers = (0..3).map(|device| (device as u64 * HEADER, HEADER, device, 0));
    let stripe = |number: u64| (5 * HEADER + number * 4096, 4096, 1 + (number % 2) as usize, HEADER + number / 2 * 4096);
    let expected: Vec<_> = headers.chain([(3 * HEADER, 2 * HEADER, 0, HEADER)]).chain((0..4).map(stripe)).collect();
    assert_eq!(pieces, expected);
    let lens = [0, 1, 2].map(|device| stripes.device_len_bytes(device));
    assert_eq!(lens, [3 * HEADER, HEADER + 8192, HEADER + 8192]);
    assert_eq!([0, 1, 2].map(|device| stripes.unit_bytes(device)), [3 * HEADER, 4096, 4096]);
    // A single device with payload is not cut: one mapping, however long it is.
    let one = Stripes::fit_behind(2 * HEADER, &[HEADER + 5 * 4096 + 64], 4096).unwrap();
    let last = one.pieces().last().unwrap();
    assert_eq!((one.pieces_len(), last.len_bytes, last.device, last.device_offset), (4, 5 * 4096 + 64, 1, HEADER));
    assert_eq!([one.unit_bytes(0), one.unit_bytes(1)], [2 * HEADER, 5 * 4096 + 64]);
    assert!(Stripes::fit_behind(2 * HEADER, &[], 4096).is_err());
    assert!(Stripes::fit_behind(2 * HEADER, &[HEADER + 4096; MAX_DEVICES], 4096).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn pieces_tile_the_pool_and_each_device(
        sizes in proptest::collection::vec(0u64..40 * 4096, 1..5), shift in 12u32..15, metadata in 0u64..4,
    ) {
        let sizes: Vec<u64> = sizes.iter().map(|size| HEADER + size).collect();
        let metadata_bytes = if metadata == 0 { 0 } else { (1 + metadata) * HEADER };
        let Ok(stripes) = Stripes::fit_behind(metadata_bytes, &sizes, 1 << shift) else { return Ok(()) };
        let sizes: Vec<u64> = (metadata > 0).then_some(metadata_bytes).into_iter().chain(sizes).collect();
        let mut next = 0;
        let mut used = vec![0; sizes.len()];
        for piece in stripes.pieces() {
            prop_assert_eq!(piece.start, next);
            prop_assert_eq!(piece.device_offset, used[piece.device]);
            prop_assert_eq!(stripes.piece_at(piece.start), Some(piece));
            next += piece.len_bytes;
            prop_assert_eq!(stripes.piece_at(next - 1), Some(piece));
            used[piece.device] += piece.len_bytes;
        }
        prop_assert_eq!(next, stripes.len_bytes());
        prop_assert_eq!(stripes.piece_at(next), None);
        for (device, (used, size)) in used.iter().zip(&sizes).enumerate() {
            prop_assert!(used <= size && *used == stripes.device_len_bytes(device));
        }
        let devices = sizes.len() as u32;
        let geometry = Geometry { devices, metadata_bytes, stripe_bytes: 1 << shift, ..Geometry::with_len(stripes.len_bytes()) };
        prop_assert_eq!(Stripes::of(&geometry).unwrap(), stripes);
    }
}
