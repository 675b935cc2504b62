// SPDX-License-Identifier: Apache-2.0
//! How the devices of a pool form one linear address space.
//!
//! One device: pool offset = device offset. Several: first the headers, device i's at pool offset i * [`DEVICE_HEADER_BYTES`], then
//! stripes of `stripe_bytes` round-robin over the devices, each device's own stripes following its header. Every device carries the same
//! number of stripes; what a larger one has beyond that is not used.
//!
//! Metadata on a device of its own: device 0 carries it and nothing else. Its `metadata_bytes`, but for its header, follow the headers
//! of all devices in one piece, and the stripes after it go round-robin over the devices from 1 on. A single such device is one stripe.

use super::Geometry;
use crate::error::{Error, Result};
use crate::limits::{DEVICE_HEADER_BYTES, MAX_DEVICES};

/// The arrangement of a pool over its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripes {
    devices: u32,
    stripe_bytes: u64,
    /// Bytes used of device 0, header included, where it carries the metadata alone; else 0.
    metadata_bytes: u64,
    /// Bytes used of each device that is striped, header included.
    striped_len_bytes: u64,
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
        Self::fit_behind(0, sizes, stripe_bytes)
    }

    /// The same after `metadata_bytes` of a device that carries the metadata alone, and is none of `sizes`; 0 = there is no such device.
    ///
    /// # Errors
    /// As [`Stripes::fit`].
    pub fn fit_behind(metadata_bytes: u64, sizes: &[u64], stripe_bytes: u64) -> Result<Self> {
        let smallest = sizes.iter().copied().min().unwrap_or(0);
        let count = sizes.len() + usize::from(metadata_bytes > 0);
        if sizes.is_empty() || count > MAX_DEVICES {
            return Err(Error::Invalid(format!("a pool has 1 to {MAX_DEVICES} devices, not {count}")));
        }
        if stripe_bytes == 0 {
            return Err(Error::Invalid("a stripe of no bytes".into()));
        }
        let striped_len_bytes = if sizes.len() == 1 {
            smallest
        } else {
            DEVICE_HEADER_BYTES + smallest.saturating_sub(DEVICE_HEADER_BYTES) / stripe_bytes * stripe_bytes
        };
        if smallest < striped_len_bytes || striped_len_bytes <= DEVICE_HEADER_BYTES {
            return Err(Error::Invalid(format!(
                "a device of {smallest} bytes has no room for its header of {DEVICE_HEADER_BYTES} bytes and one stripe of \
                 {stripe_bytes} bytes"
            )));
        }
        Ok(Stripes { devices: count as u32, stripe_bytes, metadata_bytes, striped_len_bytes })
    }

    /// The arrangement that a geometry describes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when its length is not headers, metadata and whole rounds of stripes.
    pub fn of(geometry: &Geometry) -> Result<Self> {
        geometry.check()?;
        let striped = u64::from(geometry.striped_devices());
        let round = geometry.stripe_bytes * striped;
        let bytes = geometry.len_bytes.checked_sub(geometry.metadata_bytes + striped * DEVICE_HEADER_BYTES).filter(|&bytes| bytes > 0);
        match bytes {
            Some(bytes) if striped == 1 || bytes.is_multiple_of(round) => Ok(Stripes {
                devices: geometry.devices,
                stripe_bytes: geometry.stripe_bytes,
                metadata_bytes: geometry.metadata_bytes,
                striped_len_bytes: DEVICE_HEADER_BYTES + bytes / striped,
            }),
            _ => Err(Error::Invalid(format!(
                "a pool of {} bytes is not {} headers, {} bytes of metadata apart and whole rounds of stripes of {} bytes",
                geometry.len_bytes, geometry.devices, geometry.metadata_bytes, geometry.stripe_bytes
            ))),
        }
    }

    /// Devices that are striped, and the index of the first of them.
    fn striped(&self) -> (u64, u64) {
        let first = u64::from(self.metadata_bytes > 0);
        (u64::from(self.devices) - first, first)
    }

    /// Devices that the payload is striped over.
    pub fn striped_devices(&self) -> u64 {
        self.striped().0
    }

    /// Size of the pool in bytes, headers included.
    pub fn len_bytes(&self) -> u64 {
        self.metadata_bytes + self.striped_len_bytes * self.striped_devices()
    }

    /// Stripe, in bytes.
    pub fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes
    }

    /// Bytes used of a device, header included.
    pub fn device_len_bytes(&self, device: usize) -> u64 {
        if device == 0 && self.metadata_bytes > 0 { self.metadata_bytes } else { self.striped_len_bytes }
    }

    /// What the pieces of a device are multiples of, but for its header where there are several devices, in bytes.
    pub fn unit_bytes(&self, device: usize) -> u64 {
        match (self.devices, device) {
            (1, _) => self.striped_len_bytes,
            (_, 0) if self.metadata_bytes > 0 => self.metadata_bytes,
            _ => self.piece_bytes(),
        }
    }

    /// Length of a piece after the headers and the metadata, in bytes.
    fn piece_bytes(&self) -> u64 {
        if self.striped_devices() == 1 { self.striped_len_bytes - DEVICE_HEADER_BYTES } else { self.stripe_bytes }
    }

    /// Pool offset after the headers, and after metadata that is apart.
    fn ends(&self) -> (u64, u64) {
        let headers = u64::from(self.devices) * DEVICE_HEADER_BYTES;
        (headers, headers + self.metadata_bytes.saturating_sub(DEVICE_HEADER_BYTES))
    }

    /// Number of pieces, which is the number of mappings of a process.
    pub fn pieces_len(&self) -> u64 {
        let (striped, apart) = self.striped();
        match self.devices {
            1 => 1,
            devices => u64::from(devices) + apart + striped * ((self.striped_len_bytes - DEVICE_HEADER_BYTES) / self.piece_bytes()),
        }
    }

    /// Every piece, in the order of pool offsets.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        let stripes = *self;
        (0..self.pieces_len()).map(move |number| stripes.piece(number))
    }

    /// The piece that a pool offset lies in; `None` past the end.
    pub fn piece_at(&self, offset: u64) -> Option<Piece> {
        let (headers, metadata) = self.ends();
        let number = if self.devices == 1 {
            0
        } else if offset < headers {
            offset / DEVICE_HEADER_BYTES
        } else if offset < metadata {
            u64::from(self.devices)
        } else {
            u64::from(self.devices) + self.striped().1 + (offset - metadata) / self.piece_bytes()
        };
        (offset < self.len_bytes()).then(|| self.piece(number))
    }

    fn piece(&self, number: u64) -> Piece {
        let devices = u64::from(self.devices);
        let (striped, apart) = self.striped();
        let (headers, metadata) = self.ends();
        if devices == 1 {
            Piece { start: 0, len_bytes: self.striped_len_bytes, device: 0, device_offset: 0 }
        } else if number < devices {
            let start = number * DEVICE_HEADER_BYTES;
            Piece { start, len_bytes: DEVICE_HEADER_BYTES, device: number as usize, device_offset: 0 }
        } else if number < devices + apart {
            Piece { start: headers, len_bytes: metadata - headers, device: 0, device_offset: DEVICE_HEADER_BYTES }
        } else {
            let (stripe, len_bytes) = (number - devices - apart, self.piece_bytes());
            Piece {
                start: metadata + stripe * len_bytes,
                len_bytes,
                device: (apart + stripe % striped) as usize,
                device_offset: DEVICE_HEADER_BYTES + stripe / striped * len_bytes,
            }
        }
    }

    /// The smallest power of two, at least `least_bytes`, with which devices of these sizes, after `metadata_bytes` as
    /// [`Stripes::fit_behind`] takes them, need no more than `limit` mappings; `None` when no stripe does.
    pub fn stripe_behind(metadata_bytes: u64, sizes: &[u64], least_bytes: u64, limit: u64) -> Option<u64> {
        (0..u64::BITS)
            .map(|shift| 1u64 << shift)
            .filter(|&stripe| stripe >= least_bytes)
            .map_while(|stripe| Stripes::fit_behind(metadata_bytes, sizes, stripe).ok())
            .find(|stripes| stripes.pieces_len() <= limit)
            .map(|stripes| stripes.stripe_bytes)
    }

    /// The smallest power of two, at least the stripe of this arrangement, with which its devices need no more than `limit` mappings.
    pub fn stripe_within(&self, limit: u64) -> Option<u64> {
        let sizes = vec![self.striped_len_bytes; self.striped_devices() as usize];
        Self::stripe_behind(self.metadata_bytes, &sizes, self.stripe_bytes, limit)
    }
}

#[cfg(test)]
mod tests;
