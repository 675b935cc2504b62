// SPDX-License-Identifier: Apache-2.0
//! Where every region lies, computed from the geometry that the superblock records.

use super::Region;
use crate::error::{Error, Result};
use crate::limits::*;

/// Lock of the first stripe of the hint table.
pub const FIRST_STRIPE_LOCK: u32 = 8;

/// Cells of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CellClass {
    /// Bytes of a cell: the largest block it takes; a multiple of 64.
    pub cell_bytes: u64,
    /// Cell chunks of this class.
    pub chunks: u64,
}

/// The numbers a pool is formatted with. They never change afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Devices the pool stripes over; each begins with a header of [`DEVICE_HEADER_BYTES`].
    pub devices: u32,
    /// Bytes used of device 0, its header included, where it carries the metadata alone: a multiple of [`DEVICE_HEADER_BYTES`]. 0 = the
    /// metadata lies on the devices of the payload.
    pub metadata_bytes: u64,
    /// Stripe, in bytes.
    pub stripe_bytes: u64,
    /// Size of the whole address space, headers included, in bytes.
    pub len_bytes: u64,
    /// Manager seats that machines claim, or that the format reserves: the first ones.
    pub seats: u32,
    /// Whether each slot has a manager seat as well, the owner of the slot being its owner; not in older pools.
    pub slot_seats: bool,
    /// Host slots (N).
    pub slots: u32,
    /// Locks (L).
    pub locks: u32,
    /// Cells of the object table (O).
    pub objects: u32,
    /// Chunk, in bytes: a power of two of at least 4 KiB.
    pub chunk_bytes: u64,
    /// Stats lines per slot: [`STATS_LINES`](super::STATS_LINES), or [`FIRST_STATS_LINES`](super::FIRST_STATS_LINES) in older pools.
    pub stats_lines: u32,
    /// Stripes of the hint table (S), each with a lock; 0 when the pool has no cells.
    pub stripes: u32,
    /// Cells in a cell chunk, a divisor of [`CELLS_PER_PIN`](super::CELLS_PER_PIN); 0 when the pool has no cells.
    pub cells_per_chunk: u32,
    /// The cell classes, smallest cells first; unused ones are all zero and come last.
    pub cells: [CellClass; CELL_CLASSES],
}

impl Geometry {
    /// The default geometry of a pool of `len_bytes` on one device.
    pub fn with_len(len_bytes: u64) -> Self {
        Geometry {
            devices: 1,
            metadata_bytes: 0,
            stripe_bytes: DEFAULT_STRIPE_BYTES,
            len_bytes,
            seats: DEFAULT_SEATS as u32,
            slot_seats: false,
            slots: DEFAULT_SLOTS as u32,
            locks: DEFAULT_LOCKS as u32,
            objects: DEFAULT_OBJECTS as u32,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            stats_lines: super::STATS_LINES as u32,
            stripes: 0,
            cells_per_chunk: 0,
            cells: [CellClass::default(); CELL_CLASSES],
        }
    }

    /// Cells of the object table that a pool of `len_bytes` has by default.
    pub fn default_objects(len_bytes: u64) -> u32 {
        (len_bytes / BYTES_PER_OBJECT).clamp(DEFAULT_OBJECTS as u64, MOST_DEFAULT_OBJECTS as u64) as u32
    }

    /// Refuses numbers outside the limits, naming the offending one.
    pub fn check(&self) -> Result<()> {
        let within = |name: &str, value: u64, least: u64, most: u64| match value {
            v if v >= least && v <= most => Ok(()),
            v => Err(Error::Invalid(format!("{name} is {v}, must be {least} to {most}"))),
        };
        within("devices", self.devices.into(), 1, MAX_DEVICES as u64)?;
        within("seats", self.seats.into(), 1, MAX_OPEN_SEATS as u64)?;
        within("slots", self.slots.into(), 1, MAX_SLOTS as u64)?;
        within("locks", self.locks.into(), 8, MAX_LOCKS as u64)?;
        within("objects", self.objects.into(), 1, MAX_OBJECTS as u64)?;
        within("chunk_bytes", self.chunk_bytes, 4096, 1 << 30)?;
        within("stripe_bytes", self.stripe_bytes, 4096, 1 << 40)?;
        within("len_bytes", self.len_bytes, 0, 1 << 46)?;
        if !self.chunk_bytes.is_power_of_two() || !self.stripe_bytes.is_power_of_two() {
            return Err(Error::Invalid("chunk_bytes and stripe_bytes must be powers of two".into()));
        }
        self.check_metadata()?;
        if ![super::STATS_LINES, super::FIRST_STATS_LINES].contains(&(self.stats_lines as usize)) {
            return Err(Error::Invalid(format!("{} stats lines per slot are of no format there is", self.stats_lines)));
        }
        self.check_cells()
    }

    fn check_metadata(&self) -> Result<()> {
        let bytes = self.metadata_bytes;
        if bytes == 0 {
            return Ok(());
        }
        if self.devices < 2 {
            return Err(Error::Invalid("metadata on a device of its own needs another device for the payload".into()));
        }
        if bytes <= DEVICE_HEADER_BYTES || bytes >= self.len_bytes || !bytes.is_multiple_of(DEVICE_HEADER_BYTES) {
            return Err(Error::Invalid(format!(
                "metadata_bytes is {bytes}, must be a multiple of {DEVICE_HEADER_BYTES} that is more than one and less than the pool"
            )));
        }
        Ok(())
    }

    /// Devices that the payload is striped over.
    pub fn striped_devices(&self) -> u32 {
        self.devices.saturating_sub(u32::from(self.metadata_bytes > 0))
    }

    /// Index of the first device that payload lies on.
    pub fn payload_device(&self) -> usize {
        usize::from(self.metadata_bytes > 0)
    }

    /// What the payload may have of the pool: all of it, but for metadata that is apart and its headers.
    pub fn payload_bytes(&self) -> u64 {
        match self.metadata_bytes {
            0 => self.len_bytes,
            _ => self.len_bytes.saturating_sub(self.payload_offset()),
        }
    }

    /// Pool offset at which the device of the metadata ends, and the payload begins; only where it is apart.
    fn payload_offset(&self) -> u64 {
        self.metadata_bytes + u64::from(self.striped_devices()) * DEVICE_HEADER_BYTES
    }

    /// The same geometry with as much of device 0 for the metadata alone as it needs for the `payload_bytes` of the other devices,
    /// headers not included.
    ///
    /// # Errors
    /// [`Error::Invalid`] as [`Layout::new`].
    pub fn with_metadata_apart(self, payload_bytes: u64) -> Result<Geometry> {
        // More metadata makes the pool longer, and a longer pool has more places for machines: a few rounds, as there are bounds to those.
        let mut apart = Geometry { metadata_bytes: 2 * DEVICE_HEADER_BYTES, ..self };
        loop {
            apart.len_bytes = apart.payload_offset().saturating_add(payload_bytes);
            apart.check()?;
            let (_, end) = Layout::place(&apart, Layout::chunks_behind(&apart)?.0);
            let needed = (end - u64::from(apart.striped_devices()) * DEVICE_HEADER_BYTES).next_multiple_of(DEVICE_HEADER_BYTES);
            if needed <= apart.metadata_bytes {
                return Ok(apart);
            }
            apart.metadata_bytes = needed;
        }
    }

    fn check_cells(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::Invalid(what));
        let used = self.cells.iter().take_while(|class| class.chunks > 0).count();
        let (used, unused) = self.cells.split_at(used);
        if unused.iter().any(|class| *class != CellClass::default()) || !used.is_sorted_by(|a, b| a.cell_bytes < b.cell_bytes) {
            return invalid("the cell classes must come with their cells in rising size and without gaps".into());
        }
        if used.is_empty() {
            let none = self.stripes == 0 && self.cells_per_chunk == 0;
            return if none { Ok(()) } else { invalid("stripes and cells_per_chunk are for pools with cells".into()) };
        }
        for class in used {
            let bytes = class.cell_bytes;
            if bytes == 0 || bytes > MAX_CELL_BYTES || !bytes.is_multiple_of(LINE_BYTES as u64) {
                return invalid(format!("a cell of {bytes} bytes cannot be: it must be a multiple of 64 of at most {MAX_CELL_BYTES}"));
            }
            if class.chunks > MAX_CHUNKS {
                return invalid(format!("{} cell chunks of one class are more than {MAX_CHUNKS}", class.chunks));
            }
        }
        if self.cells_per_chunk == 0 || !(super::CELLS_PER_PIN as u32).is_multiple_of(self.cells_per_chunk) {
            return invalid(format!("cells_per_chunk is {}, must divide {}", self.cells_per_chunk, super::CELLS_PER_PIN));
        }
        if self.stripes == 0 || self.stripes as usize > MAX_STRIPES || self.first_user_lock() >= self.locks {
            return invalid(format!("stripes is {}, must be 1 to {MAX_STRIPES} and leave a lock for users", self.stripes));
        }
        if self.cell_count() > MAX_CELLS {
            return invalid(format!("{} cells are more than {MAX_CELLS}: use larger ones", self.cell_count()));
        }
        Ok(())
    }

    /// Cell chunks of all classes (D).
    pub fn cell_chunks(&self) -> u64 {
        self.cells.iter().map(|class| class.chunks).sum()
    }

    /// Cells of all classes (E).
    pub fn cell_count(&self) -> u64 {
        self.cell_chunks() * u64::from(self.cells_per_chunk)
    }

    /// Bytes of all cells.
    pub fn cells_len_bytes(&self) -> u64 {
        self.cells
            .iter()
            .map(|class| class.cell_bytes.saturating_mul(class.chunks * u64::from(self.cells_per_chunk)))
            .fold(0, u64::saturating_add)
    }

    /// Hint lines of one stripe: twice as many hints as cells, and never less than a window.
    pub fn hint_lines_per_stripe(&self) -> u64 {
        match u64::from(self.stripes) {
            0 => 0,
            stripes => (self.cell_count() * 2).div_ceil(super::HINTS_PER_LINE as u64 * stripes).max(HINT_WINDOW),
        }
    }

    /// Pin lines per slot.
    pub fn pin_lines(&self) -> u64 {
        self.cell_count().div_ceil(super::CELLS_PER_PIN as u64)
    }

    /// Lines of claims on cell chunks, per slot.
    pub fn cell_claim_lines(&self) -> u64 {
        self.cell_chunks().div_ceil(super::CHUNKS_PER_CELL_CLAIM as u64)
    }

    /// The first lock that users may allocate: those below are the pool's own, the last of them one for each stripe.
    pub fn first_user_lock(&self) -> u32 {
        FIRST_STRIPE_LOCK + self.stripes
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

    /// Bindings per seat: one for each slot.
    pub fn bindings(&self) -> u64 {
        u64::from(self.slots)
    }

    /// All manager seats (K): the claimed and reserved ones, then those of the slots.
    pub fn all_seats(&self) -> u64 {
        u64::from(self.seats) + if self.slot_seats { u64::from(self.slots) } else { 0 }
    }

    /// The seat of a slot, in pools whose slots have one.
    pub fn seat_of(&self, slot: u32) -> Option<u64> {
        (self.slot_seats && slot < self.slots).then(|| u64::from(self.seats) + u64::from(slot))
    }

    /// The slot that a seat belongs to; `None` of one that is claimed or reserved.
    pub fn slot_of(&self, seat: u64) -> Option<u32> {
        let slot = seat.checked_sub(self.seats.into())?;
        (self.slot_seats && slot < u64::from(self.slots)).then_some(slot as u32)
    }

    /// Places for machines that claim a seat (P): one for each MiB of the pool, within limits.
    pub fn places(&self) -> u64 {
        (self.len_bytes >> 20).clamp(MIN_PLACES, MAX_PLACES)
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
    cells_offset: u64,
    data_offset: u64,
}

impl Layout {
    /// Lays a pool out.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a number is outside its limits or not even one chunk fits.
    pub fn new(geometry: Geometry) -> Result<Self> {
        geometry.check()?;
        if geometry.metadata_bytes > 0 {
            return Self::apart(geometry);
        }
        let header = u64::from(geometry.devices) * DEVICE_HEADER_BYTES;
        // The per-chunk metadata depends on the number of chunks, so start from the most that could fit and go down.
        let mut chunks = (geometry.len_bytes.saturating_sub(header) / geometry.chunk_bytes).min(MAX_CHUNKS);
        while chunks > 0 {
            let (spans, end) = Self::place(&geometry, chunks);
            let (cells_offset, data_offset) = Self::behind(&geometry, end);
            let room = geometry.len_bytes.saturating_sub(data_offset) / geometry.chunk_bytes;
            if room >= chunks {
                return Ok(Layout { geometry, chunks, spans, cells_offset, data_offset });
            }
            chunks = room.min(chunks - 1);
        }
        Err(Self::no_room(&geometry))
    }

    /// The layout of a pool of another version, of which the lines of its hosts alone are known; `None` where those are not one summary per
    /// slot within the pool.
    pub(super) fn of_hosts(geometry: Geometry, known: [RegionSpan; 2]) -> Option<Self> {
        geometry.check().ok()?;
        let slots = u64::from(geometry.slots);
        let lines = [slots, slots * geometry.summary_lines()];
        let fits = |span: &RegionSpan| {
            let end = span.lines.checked_mul(LINE_BYTES as u64).and_then(|bytes| span.offset.checked_add(bytes));
            span.offset.is_multiple_of(LINE_BYTES as u64) && end.is_some_and(|end| end <= geometry.len_bytes)
        };
        if known.each_ref().map(|span| span.lines) != lines || !known.iter().all(fits) {
            return None;
        }
        let mut spans = Region::ALL.map(|region| RegionSpan { region, offset: 0, lines: 0 });
        known.into_iter().for_each(|span| spans[span.region as usize - 1] = span);
        Some(Layout { geometry, chunks: 0, spans, cells_offset: geometry.len_bytes, data_offset: geometry.len_bytes })
    }

    /// Lays out a pool whose metadata lies on a device of its own: the payload begins where that device ends, however much of it is used.
    fn apart(geometry: Geometry) -> Result<Self> {
        let (chunks, cells_offset, data_offset) = Self::chunks_behind(&geometry)?;
        let (spans, end) = Self::place(&geometry, chunks);
        if end > cells_offset {
            return Err(Error::Invalid(format!(
                "the metadata needs {} bytes more than the {} of its device: use a larger one, fewer slots, locks or cells, or \
                 larger chunks",
                end - cells_offset,
                geometry.metadata_bytes
            )));
        }
        Ok(Layout { geometry, chunks, spans, cells_offset, data_offset })
    }

    /// Number of chunks, and the offsets of cells and chunks, of a pool whose metadata lies on a device of its own.
    fn chunks_behind(geometry: &Geometry) -> Result<(u64, u64, u64)> {
        let (cells_offset, data_offset) = Self::behind(geometry, geometry.payload_offset());
        match (geometry.len_bytes.saturating_sub(data_offset) / geometry.chunk_bytes).min(MAX_CHUNKS) {
            0 => Err(Self::no_room(geometry)),
            chunks => Ok((chunks, cells_offset, data_offset)),
        }
    }

    fn behind(geometry: &Geometry, end: u64) -> (u64, u64) {
        let align = geometry.chunk_bytes.min(DEVICE_HEADER_BYTES);
        let cells_offset = end.next_multiple_of(align);
        (cells_offset, cells_offset.saturating_add(geometry.cells_len_bytes()).next_multiple_of(align))
    }

    fn no_room(geometry: &Geometry) -> Error {
        Error::Invalid(format!(
            "a pool of {} bytes has no room for one chunk of {} bytes behind its metadata and cells: \
             use a larger device, fewer slots, locks or cells, or smaller chunks",
            geometry.len_bytes, geometry.chunk_bytes
        ))
    }

    /// The regions, and where the last one ends.
    fn place(geometry: &Geometry, chunks: u64) -> ([RegionSpan; Region::ALL.len()], u64) {
        let seats = geometry.all_seats();
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
                Region::Stats => slots * u64::from(geometry.stats_lines),
                Region::Descriptor => geometry.cell_count(),
                Region::Hint => u64::from(geometry.stripes) * geometry.hint_lines_per_stripe(),
                Region::Pin => slots * geometry.pin_lines(),
                Region::CellClaim => slots * geometry.cell_claim_lines(),
                // Only owners of cells listen.
                Region::Ask => {
                    if geometry.cell_chunks() == 0 {
                        0
                    } else {
                        slots
                    }
                }
                Region::Splitter => geometry.places() * 2,
                Region::Claimant => geometry.places(),
                Region::SeatClaim => geometry.places() * u64::from(geometry.seats),
            };
            let span = RegionSpan { region, offset, lines };
            // A page between regions would cost little, but neighbours in one line cost nothing: lines never share owners.
            offset += lines * LINE_BYTES as u64;
            span
        });
        (spans, offset)
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

    /// Pool offset of cell 0.
    pub fn cells_offset(&self) -> u64 {
        self.cells_offset
    }

    /// Class of a cell chunk, and how many chunks come before the first of that class; `None` when there is no such chunk.
    fn class_of_cell_chunk(&self, chunk: u64) -> Option<(usize, u64)> {
        let mut first = 0;
        for (class, cells) in self.geometry.cells.iter().enumerate() {
            if chunk < first + cells.chunks {
                return Some((class, first));
            }
            first += cells.chunks;
        }
        None
    }

    /// Class of the cells of a cell chunk.
    pub fn cell_class(&self, chunk: u64) -> Option<usize> {
        self.class_of_cell_chunk(chunk).map(|(class, _)| class)
    }

    /// Pool offset and size in bytes of a cell.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when there is no such cell.
    pub fn cell(&self, cell: u64) -> Result<(u64, u64)> {
        let per_chunk = u64::from(self.geometry.cells_per_chunk);
        let found = cell.checked_div(per_chunk).and_then(|chunk| self.class_of_cell_chunk(chunk));
        let Some((class, first)) = found else {
            return Err(Error::OutOfRange { what: "cell", offset: cell, len_bytes: 1, limit_bytes: self.geometry.cell_count() });
        };
        let before: u64 = self.geometry.cells[..class].iter().map(|class| class.chunks * per_chunk * class.cell_bytes).sum();
        let cell_bytes = self.geometry.cells[class].cell_bytes;
        Ok((self.cells_offset + before + (cell - first * per_chunk) * cell_bytes, cell_bytes))
    }

    /// The cell that a pool offset lies in, if it lies in one.
    pub fn cell_at(&self, offset: u64) -> Option<u64> {
        let per_chunk = u64::from(self.geometry.cells_per_chunk);
        let mut within = offset.checked_sub(self.cells_offset)?;
        let mut first = 0;
        for class in &self.geometry.cells {
            let cells = class.chunks * per_chunk;
            if within < cells * class.cell_bytes {
                return Some(first + within / class.cell_bytes);
            }
            within -= cells * class.cell_bytes;
            first += cells;
        }
        None
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

    /// Pool offset of the first line of `region`, and how many lines it has.
    pub fn lines_of(&self, region: Region) -> (u64, u64) {
        let span = self.span(region);
        (span.offset, span.lines)
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
        bytes.extend_from_slice(&self.cells_offset.to_le_bytes());
        bytes.extend_from_slice(&self.data_offset.to_le_bytes());
        bytes.extend_from_slice(&self.chunks.to_le_bytes());
        let low = crc32c::crc32c(&bytes);
        u64::from(low) << 32 | u64::from(crc32c::crc32c_append(!low, &bytes))
    }
}
