// SPDX-License-Identifier: Apache-2.0
//! How the devices of a pool form one linear address space.
//!
//! One device: pool offset = device offset. Several: first the headers, device i's at pool offset i * [`DEVICE_HEADER_BYTES`], then
//! stripes of `stripe_bytes` round-robin over the devices, each device's own stripes following its header. Every device carries the same
//! number of stripes; what a larger one has beyond that is not used.

use super::Geometry;
use crate::error::{Error, Result};
use crate::limits::{DEVICE_HEADER_BYTES, MAX_DEVICES};

/// The arrangement of a pool over its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripes {
    devices: u32,
    stripe_bytes: u64,
    /// Bytes used of each device, header included.
    device_len_bytes: u64,
}

/// A stretch of the pool that lies in one piece on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Pool offset.
    pub start: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Index of the device.
    pub device: usize,
    /// Offset on the device.
    pub device_offset: u64,
}

impl Stripes {
    /// The largest arrangement over devices of these sizes in bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there are none or too many, or the smallest holds no stripe.
    pub fn fit(sizes: &[u64], stripe_bytes: u64) -> Result<Self> {
        let smallest = sizes.iter().copied().min().unwrap_or(0);
        let count = sizes.len();
        if count == 0 || count > MAX_DEVICES {
            return Err(Error::Invalid(format!("a pool has 1 to {MAX_DEVICES} devices, not {count}")));
        }
        if stripe_bytes == 0 {
            return Err(Error::Invalid("a stripe of no bytes".into()));
        }
        let device_len_bytes = if count == 1 {
            smallest
        } else {
            DEVICE_HEADER_BYTES + smallest.saturating_sub(DEVICE_HEADER_BYTES) / stripe_bytes * stripe_bytes
        };
        if smallest < device_len_bytes || device_len_bytes <= DEVICE_HEADER_BYTES {
            return Err(Error::Invalid(format!(
                "a device of {smallest} bytes has no room for its header of {DEVICE_HEADER_BYTES} bytes and one stripe of \
                 {stripe_bytes} bytes"
            )));
        }
        Ok(Stripes { devices: count as u32, stripe_bytes, device_len_bytes })
    }

    /// The arrangement that a geometry describes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when its length is not headers and whole rounds of stripes.
    pub fn of(geometry: &Geometry) -> Result<Self> {
        geometry.check()?;
        let devices = u64::from(geometry.devices);
        let round = geometry.stripe_bytes * devices;
        let striped = geometry.len_bytes.checked_sub(devices * DEVICE_HEADER_BYTES).filter(|&bytes| bytes > 0);
        match striped {
            Some(bytes) if devices == 1 || bytes.is_multiple_of(round) => Ok(Stripes {
                devices: geometry.devices,
                stripe_bytes: geometry.stripe_bytes,
                device_len_bytes: DEVICE_HEADER_BYTES + bytes / devices,
            }),
            _ => Err(Error::Invalid(format!(
                "a pool of {} bytes is not {devices} headers and whole rounds of stripes of {} bytes",
                geometry.len_bytes, geometry.stripe_bytes
            ))),
        }
    }

    /// Size of the pool in bytes, headers included.
    pub fn len_bytes(&self) -> u64 {
        self.device_len_bytes * u64::from(self.devices)
    }

    /// Stripe, in bytes.
    pub fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes
    }

    /// Bytes used of each device, header included.
    pub fn device_len_bytes(&self) -> u64 {
        self.device_len_bytes
    }

    /// Number of pieces, which is the number of mappings of a process.
    pub fn pieces_len(&self) -> u64 {
        match self.devices {
            1 => 1,
            devices => u64::from(devices) * (1 + (self.device_len_bytes - DEVICE_HEADER_BYTES) / self.stripe_bytes),
        }
    }

    /// Every piece, in the order of pool offsets.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        let stripes = *self;
        (0..self.pieces_len()).map(move |number| stripes.piece(number))
    }

    /// The piece that a pool offset lies in; `None` behind the end.
    pub fn piece_at(&self, offset: u64) -> Option<Piece> {
        let headers = u64::from(self.devices) * DEVICE_HEADER_BYTES;
        let number = match offset.checked_sub(headers) {
            _ if self.devices == 1 => 0,
            None => offset / DEVICE_HEADER_BYTES,
            Some(striped) => u64::from(self.devices) + striped / self.stripe_bytes,
        };
        (offset < self.len_bytes()).then(|| self.piece(number))
    }

    fn piece(&self, number: u64) -> Piece {
        let devices = u64::from(self.devices);
        let (round, device) = (number / devices, number % devices);
        if devices == 1 {
            Piece { start: 0, len_bytes: self.device_len_bytes, device: 0, device_offset: 0 }
        } else if round == 0 {
            let start = device * DEVICE_HEADER_BYTES;
            Piece { start, len_bytes: DEVICE_HEADER_BYTES, device: device as usize, device_offset: 0 }
        } else {
            let stripe = number - devices;
            Piece {
                start: devices * DEVICE_HEADER_BYTES + stripe * self.stripe_bytes,
                len_bytes: self.stripe_bytes,
                device: device as usize,
                device_offset: DEVICE_HEADER_BYTES + (round - 1) * self.stripe_bytes,
            }
        }
    }

    /// The smallest power of two, at least `least_bytes`, with which devices of these sizes need no more than `limit` mappings; `None`
    /// when no stripe does.
    pub fn stripe_within(sizes: &[u64], least_bytes: u64, limit: u64) -> Option<u64> {
        (0..u64::BITS)
            .map(|shift| 1u64 << shift)
            .filter(|&stripe| stripe >= least_bytes)
            .map_while(|stripe| Stripes::fit(sizes, stripe).ok())
            .find(|stripes| stripes.pieces_len() <= limit)
            .map(|stripes| stripes.stripe_bytes)
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(stripes.device_len_bytes(), HEADER + 2 * 4096);
        assert_eq!(stripes.len_bytes(), 2 * HEADER + 4 * 4096);
        let places: Vec<_> = stripes.pieces().map(|piece| (piece.device, piece.device_offset)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (0, HEADER), (1, HEADER), (0, HEADER + 4096), (1, HEADER + 4096)]);
    }

    #[test]
    fn a_stripe_that_fits_the_limit_is_found() {
        let sizes = [HEADER + (1 << 40), HEADER + (1 << 40)];
        let stripe = Stripes::stripe_within(&sizes, HEADER, 32765).unwrap();
        assert!(Stripes::fit(&sizes, stripe).unwrap().pieces_len() <= 32765);
        assert!(Stripes::fit(&sizes, stripe / 2).unwrap().pieces_len() > 32765);
        assert_eq!(Stripes::stripe_within(&sizes, HEADER, 2), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn pieces_tile_the_pool_and_each_device(sizes in proptest::collection::vec(0u64..40 * 4096, 1..5), shift in 12u32..15) {
            let sizes: Vec<u64> = sizes.iter().map(|size| HEADER + size).collect();
            let Ok(stripes) = Stripes::fit(&sizes, 1 << shift) else { return Ok(()) };
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
            for (used, size) in used.iter().zip(&sizes) {
                prop_assert!(used <= size && *used == stripes.device_len_bytes());
            }
            let geometry = Geometry { devices: sizes.len() as u32, stripe_bytes: 1 << shift, ..Geometry::with_len(stripes.len_bytes()) };
            prop_assert_eq!(Stripes::of(&geometry).unwrap(), stripes);
        }
    }
}
