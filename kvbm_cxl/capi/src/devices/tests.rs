// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn ranges_of_a_device_are_found_in_the_pool() {
    let piece = |start, device_offset| Piece { start, len_bytes: 100, device: 0, device_offset };
    let pieces = [piece(1000, 0), piece(3000, 100), piece(5000, 200)];
    assert_eq!(stretches(&pieces, 0, 100).unwrap(), [(1000, 100)]);
    assert_eq!(stretches(&pieces, 50, 200).unwrap(), [(1050, 50), (3000, 100), (5000, 50)]);
    assert_eq!(stretches(&pieces, 299, 1).unwrap(), [(5099, 1)]);
    assert_eq!(stretches(&pieces, 300, 0).unwrap(), []);
    assert_eq!(stretches(&pieces, 299, 2), None);
    assert_eq!(stretches(&[piece(0, 100)], 50, 60), None);
}
