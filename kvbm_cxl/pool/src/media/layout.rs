// SPDX-License-Identifier: Apache-2.0
//! Where every region lies, computed from the geometry that the superblock records.

use super::Region;
use crate::error::{Error, Result};
use crate::limits::*;

/// The numbers a pool is formatted with. They never change afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Devices the pool stripes over; each begins with a header of [`DEVICE_HEADER_BYTES`].
    pub devices: u32,
    /// Stripe, in bytes.
    pub stripe_bytes: u64,
    /// Size of the whole address space, headers included, in bytes.
    pub len_bytes: u64,
    /// Manager seats (K).
    pub seats: u32,
    /// Host slots (N).
    pub slots: u32,
    /// Locks (L).
    pub locks: u32,
    /// Cells of the object table (O).
    pub objects: u32,
    /// Chunk, in bytes: a power of two of at least 4 KiB.
    pub chunk_bytes: u64,
}

impl Geometry {
    /// The default geometry of a pool of `len_bytes` on one device.
    pub fn with_len(len_bytes: u64) -> Self {
        Geometry {
            devices: 1,
            stripe_bytes: DEFAULT_STRIPE_BYTES,
            len_bytes,
            seats: DEFAULT_SEATS as u32,
            slots: DEFAULT_SLOTS as u32,
            locks: DEFAULT_LOCKS as u32,
            objects: DEFAULT_OBJECTS as u32,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
        }
    }

    /// Refuses numbers outside the limits, naming the offending one.
    pub fn check(&self) -> Result<()> {
        let within = |name: &str, value: u64, least: u64, most: u64| match value {
            v if v >= least && v <= most => Ok(()),
            v => Err(Error::Invalid(format!("{name} is {v}, must be {least} to {most}"))),
        };
        within("devices", self.devices.into(), 1, MAX_DEVICES as u64)?;
        within("seats", self.seats.into(), 1, MAX_SEATS as u64)?;
        within("slots", self.slots.into(), 1, MAX_SLOTS as u64)?;
        within("locks", self.locks.into(), 8, MAX_LOCKS as u64)?;
        within("objects", self.objects.into(), 1, MAX_OBJECTS as u64)?;
        within("chunk_bytes", self.chunk_bytes, 4096, 1 << 30)?;
        within("stripe_bytes", self.stripe_bytes, 4096, 1 << 40)?;
        within("len_bytes", self.len_bytes, 0, 1 << 46)?;
        if !self.chunk_bytes.is_power_of_two() || !self.stripe_bytes.is_power_of_two() {
            return Err(Error::Invalid("chunk_bytes and stripe_bytes must be powers of two".into()));
        }
        Ok(())
    }

    /// Request lines per slot.
    pub fn request_lines(&self) -> u64 {
        u64::from(self.locks).div_ceil(super::LOCKS_PER_REQUEST as u64)
    }

    /// Summary lines per slot.
    pub fn summary_lines(&self) -> u64 {
        self.request_lines().div_ceil(super::VERSIONS_PER_SUMMARY as u64)
    }

    /// Grant lines per seat.
    pub fn grant_lines(&self) -> u64 {
        u64::from(self.locks).div_ceil(super::LOCKS_PER_GRANT as u64)
    }

    /// Fence lines, and death lines, per seat.
    pub fn fence_lines(&self) -> u64 {
        u64::from(self.slots).div_ceil(super::SLOTS_PER_FENCE as u64)
    }

    /// Bindings per seat: one for each slot, then one for each seat.
    pub fn bindings(&self) -> u64 {
        u64::from(self.slots + self.seats)
    }

    /// Records that hold the table of allocated locks.
    pub fn lock_table_records(&self) -> u64 {
        u64::from(self.locks).div_ceil(super::LOCKS_PER_RECORD as u64)
    }

    /// Records per slot: the lock table, then one for each object cell.
    pub fn records(&self) -> u64 {
        self.lock_table_records() + u64::from(self.objects)
    }

    /// Keep-map lines per chunk.
    pub fn keep_lines(&self) -> u64 {
        (self.chunk_bytes / MIN_BLOCK_BYTES).div_ceil(super::BLOCKS_PER_KEEP as u64)
    }
}

/// One region's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpan {
    /// The region.
    pub region: Region,
    /// Pool offset of line 0.
    pub offset: u64,
    /// Number of lines.
    pub lines: u64,
}

/// Where everything in a pool lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    geometry: Geometry,
    chunks: u64,
    spans: [RegionSpan; Region::ALL.len()],
    data_offset: u64,
}

impl Layout {
    /// Lays a pool out.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a number is outside its limits or not even one chunk fits.
    pub fn new(geometry: Geometry) -> Result<Self> {
        geometry.check()?;
        let header = u64::from(geometry.devices) * DEVICE_HEADER_BYTES;
        // The per-chunk metadata depends on the number of chunks, so start from the most that could fit and go down.
        let mut chunks = (geometry.len_bytes.saturating_sub(header) / geometry.chunk_bytes).min(MAX_CHUNKS);
        while chunks > 0 {
            let (spans, data_offset) = Self::place(&geometry, chunks);
            let room = geometry.len_bytes.saturating_sub(data_offset) / geometry.chunk_bytes;
            if room >= chunks {
                return Ok(Layout { geometry, chunks, spans, data_offset });
            }
            chunks = room.min(chunks - 1);
        }
        Err(Error::Invalid(format!(
            "a pool of {} bytes has no room for one chunk of {} bytes behind its metadata: \
             use a larger device, fewer slots or locks, or smaller chunks",
            geometry.len_bytes, geometry.chunk_bytes
        )))
    }

    fn place(geometry: &Geometry, chunks: u64) -> ([RegionSpan; Region::ALL.len()], u64) {
        let seats = u64::from(geometry.seats);
        let slots = u64::from(geometry.slots);
        let mut offset = u64::from(geometry.devices) * DEVICE_HEADER_BYTES;
        let spans = Region::ALL.map(|region| {
            let lines = match region {
                Region::Seat => seats,
                Region::Grant => seats * geometry.grant_lines(),
                Region::Binding => seats * geometry.bindings(),
                Region::Fence | Region::Death => seats * geometry.fence_lines(),
                Region::JoinBox => JOINBOXES as u64,
                Region::Identity => slots,
                Region::Summary => slots * geometry.summary_lines(),
                Region::Request => slots * geometry.request_lines(),
                Region::Intent => slots * INTENTS as u64,
                Region::Record => slots * geometry.records(),
                Region::Claim => slots * chunks.div_ceil(super::CHUNKS_PER_CLAIM as u64),
                Region::FreeBox | Region::FreeAck => slots * slots,
                Region::ChunkHead => chunks,
                Region::KeepMap => chunks * geometry.keep_lines(),
                Region::Stats => slots * super::STATS_LINES as u64,
            };
            let span = RegionSpan { region, offset, lines };
            // A page between regions would cost little, but neighbours in one line cost nothing: lines never share owners.
            offset += lines * LINE_BYTES as u64;
            span
        });
        (spans, offset.next_multiple_of(geometry.chunk_bytes.min(DEVICE_HEADER_BYTES)))
    }

    /// The geometry this was computed from.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Every region's place.
    pub fn spans(&self) -> &[RegionSpan] {
        &self.spans
    }

    /// One region's place.
    pub fn span(&self, region: Region) -> RegionSpan {
        self.spans[region as usize - 1]
    }

    /// Number of chunks (C).
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Claim lines per slot.
    pub fn claim_lines(&self) -> u64 {
        self.chunks.div_ceil(super::CHUNKS_PER_CLAIM as u64)
    }

    /// Pool offset of chunk 0.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// Pool offset of a chunk.
    pub fn chunk_offset(&self, chunk: u64) -> Result<u64> {
        if chunk >= self.chunks {
            return Err(Error::OutOfRange { what: "chunk", offset: chunk, len_bytes: 1, limit_bytes: self.chunks });
        }
        Ok(self.data_offset + chunk * self.geometry.chunk_bytes)
    }

    /// The chunk that a pool offset lies in, if it lies in one.
    pub fn chunk_of(&self, offset: u64) -> Option<u64> {
        let chunk = offset.checked_sub(self.data_offset)? / self.geometry.chunk_bytes;
        (chunk < self.chunks).then_some(chunk)
    }

    /// Pool offset of line `index` of `region`.
    pub fn line_offset(&self, region: Region, index: u64) -> Result<u64> {
        let span = self.span(region);
        if index >= span.lines {
            return Err(Error::OutOfRange { what: "metadata line", offset: index, len_bytes: 1, limit_bytes: span.lines });
        }
        Ok(span.offset + index * LINE_BYTES as u64)
    }

    /// The region and line number at a pool offset, if it lies in one.
    pub fn line_at(&self, offset: u64) -> Option<(Region, u64)> {
        self.spans.iter().find_map(|span| {
            let line = offset.checked_sub(span.offset)? / LINE_BYTES as u64;
            (line < span.lines).then_some((span.region, line))
        })
    }

    /// A digest of the region table, so that two builds that would place anything differently refuse each other's pools.
    pub fn digest(&self) -> u64 {
        let mut bytes = Vec::with_capacity(self.spans.len() * 20);
        for span in &self.spans {
            bytes.extend_from_slice(&(span.region as u32).to_le_bytes());
            bytes.extend_from_slice(&span.offset.to_le_bytes());
            bytes.extend_from_slice(&span.lines.to_le_bytes());
        }
        bytes.extend_from_slice(&self.data_offset.to_le_bytes());
        bytes.extend_from_slice(&self.chunks.to_le_bytes());
        let low = crc32c::crc32c(&bytes);
        u64::from(low) << 32 | u64::from(crc32c::crc32c_append(!low, &bytes))
    }
}
