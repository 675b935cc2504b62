// SPDX-License-Identifier: Apache-2.0
//! One function for each parser: it takes any bytes, and panics when the parser breaks its promise. The fuzz targets in
//! `kvbm_cxl/fuzz` and the smoke test next to this file run the same functions.

use cxl_pool::coherence::Coherence;
use cxl_pool::device::{PoolSpec, parse_size};
use cxl_pool::limits::{CELL_CLASSES, DEVICE_HEADER_BYTES};
use cxl_pool::line::{Line, Lines, verify_line};
use cxl_pool::media::*;
use cxl_pool::platform::MachineId;
use cxl_pool::{Error, Result};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// Bytes that [`lines`] wants: region, line number, line.
pub const LINES_BYTES: usize = 1 + 8 + 64;
/// Bytes that [`layout`] wants: the numbers of a geometry.
pub const LAYOUT_BYTES: usize = 6 * 4 + 3 * 8 + 2 * 4 + 2 * CELL_CLASSES * 4;

/// A superblock is refused, or is exactly the bytes it was read from and agrees with itself.
pub fn superblock(data: &[u8]) {
    check_superblock(data);
    check_patched(good_superblock().encode(), data);
    check_patched(apart_superblock().encode(), data);
    let mut earlier = good_superblock().encode().to_vec();
    earlier[8] = 2;
    check_patched(&earlier, data);
}

/// As changes to a good superblock as well, with a right checksum: neither is found by chance.
fn check_patched(good: &[u8], data: &[u8]) {
    let mut bytes = good.to_vec();
    for patch in data.chunks_exact(10).take(64) {
        let at = usize::from(u16::from_le_bytes([patch[0], patch[1]])) % (SUPERBLOCK_BYTES - 8);
        bytes[at..at + 8].copy_from_slice(&patch[2..]);
    }
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    check_superblock(&bytes);
}

/// A superblock of a pool over two devices.
pub fn good_superblock() -> Superblock {
    superblock_of(2, |geometry| geometry)
}

/// A superblock of a pool over two devices, and one that carries the metadata alone.
pub fn apart_superblock() -> Superblock {
    superblock_of(3, |geometry| Geometry { devices: 3, ..geometry }.with_metadata_apart(16 << 20).unwrap())
}

fn superblock_of(devices: u8, change: impl FnOnce(Geometry) -> Geometry) -> Superblock {
    let mut geometry = Geometry { devices: 2, ..Geometry::with_len(2 * (DEVICE_HEADER_BYTES + (8 << 20))) };
    (geometry.stripes, geometry.cells_per_chunk) = (16, 14);
    geometry.cells[0] = CellClass { cell_bytes: 4096, chunks: 20 };
    geometry.cells[1] = CellClass { cell_bytes: 65536, chunks: 3 };
    let record = |id: u8| DeviceRecord { id: [id; 16], len_bytes: 10 << 20, name: format!("/dev/dax{id}.0") };
    let parts = SuperblockParts {
        uuid: [1; 16],
        incarnation: 9,
        layout: Layout::new(change(geometry)).unwrap(),
        coherence: CoherenceMode::Software,
        seats: vec![MachineId([8; 16])],
        devices: (1..=devices).map(record).collect(),
    };
    Superblock::new(&parts).unwrap()
}

fn check_superblock(data: &[u8]) {
    match Superblock::decode("device", data) {
        Ok(superblock) => {
            assert_eq!(superblock.encode(), &data[..SUPERBLOCK_BYTES]);
            assert!(superblock.device_index() < superblock.devices().len());
            assert_eq!(superblock.seats().len(), superblock.layout().geometry().seats as usize);
            check_layout(superblock.layout());
        }
        Err(Error::NotAPool { reason, .. }) => assert!(!reason.is_empty()),
        Err(other) => panic!("{other:?}"),
    }
    // Of an earlier version, the lines of its hosts lie within the pool.
    if let Some(earlier) = Superblock::decode_earlier(data) {
        let geometry = earlier.layout().geometry();
        for (region, lines) in [(Region::Identity, 1), (Region::Summary, geometry.summary_lines())] {
            let span = earlier.layout().span(region);
            assert_eq!(span.lines, u64::from(geometry.slots) * lines);
            assert!(span.offset % 64 == 0 && span.offset + span.lines * 64 <= geometry.len_bytes, "{span:?}");
        }
    }
}

/// A geometry is refused, or laid out within its pool and without overlaps.
pub fn layout(data: &[u8]) {
    let Some(data) = data.get(..LAYOUT_BYTES) else { return };
    let small = |index: usize| u32::from_le_bytes(std::array::from_fn(|byte| data[index * 4 + byte]));
    let large = |index: usize| u64::from_le_bytes(std::array::from_fn(|byte| data[24 + index * 8 + byte]));
    // The last small number says which of the others are cut down to about their limits, so that not all inputs are refused at once.
    let near = |bit: u32, value: u32, limit: u32| if small(5) >> bit & 1 == 0 { value % limit } else { value };
    let power = |bit: u32, value: u64| if small(5) >> bit & 1 == 0 { 1 << (value % 44) } else { value };
    let mut geometry = Geometry {
        devices: near(0, small(0), 18),
        seats: near(1, small(1), 10),
        slots: near(2, small(2), 70),
        locks: near(3, small(3), 70_000),
        objects: near(4, small(4), 20_000),
        stripe_bytes: power(5, large(0)),
        chunk_bytes: power(6, large(1)),
        len_bytes: large(2) >> (small(5) >> 8 & 63),
        ..Geometry::with_len(0)
    };
    // Every second input has cells; their numbers come last.
    if small(5) >> 15 & 1 == 0 {
        let cell = |index: usize| u32::from_le_bytes(std::array::from_fn(|byte| data[48 + index * 4 + byte]));
        geometry.stripes = near(7, cell(0), 1030);
        geometry.cells_per_chunk = if small(5) >> 16 & 1 == 0 { [112, 56, 28, 16, 14, 7, 2, 1][cell(1) as usize % 8] } else { cell(1) };
        for (class, sizes) in geometry.cells.iter_mut().zip(0..1 + cell(0) as usize % CELL_CLASSES) {
            let (bytes, chunks) = (cell(2 + 2 * sizes), cell(3 + 2 * sizes));
            let lines = if small(5) >> 17 & 1 == 0 { u64::from(bytes % 4096) * 64 } else { bytes.into() };
            *class = CellClass { cell_bytes: lines, chunks: near(18, chunks, 5000).into() };
        }
        geometry.cells.sort_by_key(|class| (class.chunks == 0, class.cell_bytes));
    }
    if small(5) >> 14 & 1 == 0 {
        // Whole rounds of stripes, as a format makes them.
        let each = DEVICE_HEADER_BYTES.saturating_add(geometry.stripe_bytes.saturating_mul(large(2) % 512));
        geometry.len_bytes = each.saturating_mul(geometry.devices.into());
    }
    if small(5) >> 19 & 3 == 0 {
        // Metadata on a device of its own: as much of it as it needs, or any number.
        geometry.metadata_bytes = if small(5) >> 21 & 1 == 0 { (large(2) >> 40 & 63) * DEVICE_HEADER_BYTES } else { large(0) };
        if let Ok(apart) = geometry.with_metadata_apart(large(1) >> (small(5) >> 22 & 63)) {
            check_layout(&Layout::new(apart).unwrap());
        }
    }
    if let Ok(layout) = Layout::new(geometry) {
        check_layout(&layout);
    }
    if let Ok(stripes) = Stripes::of(&geometry) {
        assert_eq!(stripes.len_bytes(), geometry.len_bytes);
        assert!(stripes.pieces().next().is_some());
    }
}

fn check_layout(layout: &Layout) {
    let geometry = layout.geometry();
    assert!(layout.chunks() > 0);
    let mut end = u64::from(geometry.devices) * DEVICE_HEADER_BYTES;
    for span in layout.spans() {
        assert_eq!(span.offset, end);
        end += span.lines * 64;
        assert!(layout.line_offset(span.region, span.lines).is_err());
        if span.lines == 0 {
            continue;
        }
        let last = layout.line_offset(span.region, span.lines - 1).unwrap();
        assert_eq!(layout.line_at(last), Some((span.region, span.lines - 1)));
    }
    assert!(end <= layout.cells_offset() && layout.cells_offset() + geometry.cells_len_bytes() <= layout.data_offset());
    check_cells(layout);
    let last = layout.chunk_offset(layout.chunks() - 1).unwrap();
    assert!(last + geometry.chunk_bytes <= geometry.len_bytes);
    assert_eq!(layout.chunk_of(last), Some(layout.chunks() - 1));
    assert!(layout.chunk_offset(layout.chunks()).is_err());
}

/// Cells follow one another without gaps and without overlaps, and each is found by its offset.
fn check_cells(layout: &Layout) {
    let (geometry, mut first, mut end) = (layout.geometry(), 0, layout.cells_offset());
    for class in &geometry.cells {
        let count = class.chunks * u64::from(geometry.cells_per_chunk);
        for cell in [first, (first + count).saturating_sub(1)].into_iter().filter(|_| count > 0) {
            let (offset, cell_bytes) = layout.cell(cell).unwrap();
            assert_eq!((offset, cell_bytes), (end + (cell - first) * class.cell_bytes, class.cell_bytes));
            assert_eq!((layout.cell_at(offset), layout.cell_at(offset + cell_bytes - 1)), (Some(cell), Some(cell)));
        }
        (first, end) = (first + count, end + count * class.cell_bytes);
    }
    assert_eq!((first, end), (geometry.cell_count(), layout.cells_offset() + geometry.cells_len_bytes()));
    assert!(layout.cell(first).is_err() && layout.cell_at(end).is_none() && layout.cell_class(geometry.cell_chunks()).is_none());
}

/// A line of any structure is refused, or comes back as it was; once sealed, only its own bounds can refuse it.
pub fn lines(data: &[u8]) {
    let Some(data) = data.get(..LINES_BYTES) else { return };
    let region = Region::ALL[usize::from(data[0]) % Region::ALL.len()];
    let index = u64::from_le_bytes(std::array::from_fn(|byte| data[1 + byte]));
    let line = Line(std::array::from_fn(|byte| data[9 + byte]));
    let lines = no_lines();
    check_outcome(verify_line(lines, region, index, &line));
    check_line::<Seat>(index, &line);
    check_line::<GrantLine>(index, &line);
    check_line::<Binding>(index, &line);
    check_line::<FenceLine>(index, &line);
    check_line::<DeathLine>(index, &line);
    check_line::<JoinBox>(index, &line);
    check_line::<Identity>(index, &line);
    check_line::<Summary>(index, &line);
    check_line::<RequestLine>(index, &line);
    check_line::<Intent>(index, &line);
    check_line::<Record>(index, &line);
    check_line::<Claim>(index, &line);
    check_line::<FreeBox>(index, &line);
    check_line::<FreeAck>(index, &line);
    check_line::<ChunkHead>(index, &line);
    check_line::<KeepMap>(index, &line);
    check_line::<StatsLine>(index, &line);
    check_line::<Descriptor>(index, &line);
    check_line::<HintLine>(index, &line);
    check_line::<PinLine>(index, &line);
    check_line::<CellClaim>(index, &line);
    check_line::<Ask>(index, &line);
    check_line::<Splitter>(index, &line);
    check_line::<Claimant>(index, &line);
    check_line::<SeatClaim>(index, &line);
}

fn check_line<T: MediaLine>(index: u64, line: &Line) {
    let lines = no_lines();
    check_outcome(lines.open::<T>(index, line));
    let value: T = bytemuck::cast(*line);
    let sealed = lines.seal(index, value);
    assert_eq!(sealed.0[4..], line.0[4..]);
    match lines.open::<T>(index, &sealed) {
        Ok(found) => {
            assert_eq!(bytemuck::cast::<T, Line>(found), sealed);
            verify_line(lines, T::REGION, index, &sealed).unwrap();
        }
        Err(Error::BadLine { .. }) => assert!(value.check().is_err()),
        Err(other) => panic!("{other:?}"),
    }
    assert!(lines.open::<T>(index.wrapping_add(1), &sealed).is_err());
}

/// A line of every structure that was sealed comes back as it was; with any one bit turned over, in another place, or in another pool, it
/// does not verify.
pub fn sealed_lines(words: [u64; 8], index: u64, other_index: u64) {
    check_sealed::<Seat>(words, index, other_index);
    check_sealed::<GrantLine>(words, index, other_index);
    check_sealed::<Binding>(words, index, other_index);
    check_sealed::<FenceLine>(words, index, other_index);
    check_sealed::<DeathLine>(words, index, other_index);
    check_sealed::<JoinBox>(words, index, other_index);
    check_sealed::<Identity>(words, index, other_index);
    check_sealed::<Summary>(words, index, other_index);
    check_sealed::<RequestLine>(words, index, other_index);
    check_sealed::<Intent>(words, index, other_index);
    check_sealed::<Record>(words, index, other_index);
    check_sealed::<Claim>(words, index, other_index);
    check_sealed::<FreeBox>(words, index, other_index);
    check_sealed::<FreeAck>(words, index, other_index);
    check_sealed::<ChunkHead>(words, index, other_index);
    check_sealed::<KeepMap>(words, index, other_index);
    check_sealed::<StatsLine>(words, index, other_index);
    check_sealed::<Descriptor>(words, index, other_index);
    check_sealed::<HintLine>(words, index, other_index);
    check_sealed::<PinLine>(words, index, other_index);
    check_sealed::<CellClaim>(words, index, other_index);
    check_sealed::<Ask>(words, index, other_index);
    check_sealed::<Splitter>(words, index, other_index);
    check_sealed::<Claimant>(words, index, other_index);
    check_sealed::<SeatClaim>(words, index, other_index);
}

fn check_sealed<T: MediaLine>(words: [u64; 8], index: u64, other_index: u64) {
    let lines = no_lines();
    // The words as they are, and cut down until the structure's bounds allow them: four bits of each 32 are small in every field.
    let cut = |mask: u64| bytemuck::cast::<[u64; 8], T>(words.map(|word| word & mask));
    // A byte that says the version is zero in some.
    let masks =
        [u64::MAX, 0xffff_ff00_ffff_ffff, 0x0fff_ffff_0fff_ffff, 0x0303_0303_0303_0303, 0x0000_0003_0000_0003, 0x0000_0001_0000_0001];
    let Some(value) = masks.map(cut).into_iter().find(|value| value.check().is_ok()) else {
        panic!("no value of {:?} is within its bounds", T::REGION);
    };
    let sealed = lines.seal(index, value);
    let found = lines.open::<T>(index, &sealed).unwrap();
    assert_eq!(bytemuck::cast::<T, Line>(found), sealed);
    assert_eq!(sealed.0[4..], bytemuck::cast::<T, Line>(value).0[4..]);
    for bit in 0..512 {
        let mut turned = sealed;
        turned.0[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(lines.open::<T>(index, &turned), Err(Error::BadLine { .. })), "bit {bit} of {:?}", T::REGION);
    }
    if other_index != index {
        assert!(lines.open::<T>(other_index, &sealed).is_err());
    }
    for region in Region::ALL.into_iter().filter(|region| *region != T::REGION) {
        assert!(verify_line(lines, region, index, &sealed).is_err(), "{:?} passes for {region:?}", T::REGION);
    }
    for (uuid, incarnation) in [([8; 16], 1), ([7; 16], 2)] {
        let elsewhere = Lines::new(lines.memory().clone(), lines.layout().clone(), &uuid, incarnation);
        assert!(elsewhere.open::<T>(index, &sealed).is_err(), "{uuid:?} {incarnation}");
    }
}

fn check_outcome<T>(outcome: Result<T>) {
    assert!(matches!(outcome, Ok(_) | Err(Error::BadLine { .. })));
}

/// A pool name is refused, or means the same when it is written out and read again.
pub fn pool_spec(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = parse_size(text);
    if let Ok(spec) = PoolSpec::parse(text) {
        assert!(spec.parts().all(|part| part.path.is_absolute()));
        assert_eq!(PoolSpec::parse(&spec.to_string()).unwrap(), spec);
    }
}

/// Lines of a pool without memory: enough to seal and to open.
fn no_lines() -> &'static Lines {
    static LINES: OnceLock<Lines> = OnceLock::new();
    LINES.get_or_init(|| Lines::new(Arc::new(NoMemory), Arc::new(Layout::new(Geometry::with_len(1 << 30)).unwrap()), &[7; 16], 1))
}

struct NoMemory;

fn nothing<T>() -> Result<T> {
    Err(Error::Closed)
}

impl Coherence for NoMemory {
    fn len_bytes(&self) -> u64 {
        0
    }
    fn load_line(&self, _offset: u64) -> Result<Line> {
        nothing()
    }
    fn write_line(&self, _offset: u64, _line: &Line) -> Result<()> {
        nothing()
    }
    fn flush_line(&self, _offset: u64) -> Result<()> {
        nothing()
    }
    fn fence_stores(&self) {}
    fn fence_all(&self) {}
    fn fence_loads(&self) {}
    fn flush_range(&self, _offset: u64, _len_bytes: u64) -> Result<()> {
        nothing()
    }
    fn copy_in(&self, _offset: u64, _source: &[u8]) -> Result<()> {
        nothing()
    }
    fn copy_out(&self, _offset: u64, _destination: &mut [u8]) -> Result<()> {
        nothing()
    }
    fn address(&self, _offset: u64, _len_bytes: u64) -> Option<NonNull<u8>> {
        None
    }
}
