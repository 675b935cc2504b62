// SPDX-License-Identifier: Apache-2.0
//! The superblock: the first 4 KiB of every device, which say that it belongs to a pool, to which, and how that pool is laid out.
//!
//! The copies on the devices of one pool differ in `device_index` and the CRC only. Line 0 holds magic, version, CRC, UUID, incarnation
//! and the feature bits; it is written last, and the CRC covers all 64 lines, so that a torn format is not a pool.
//!
//! Feature bits, for a program that does not know one: **compat** - ignore it; **ro-compat** - read, never write; **incompat** - refuse.

mod earlier;

use super::{CellClass, FIRST_STATS_LINES, Geometry, Layout, Region, STATS_LINES, Stripes};
use crate::error::{Error, Result, escaped};
use crate::limits::{CELL_CLASSES, MAX_DEVICES, MAX_OPEN_SEATS};
use crate::machine_id::MachineId;
use bytemuck::{Pod, Zeroable};

/// Bytes of a superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// The first bytes of every device of a pool.
pub const MAGIC: [u8; 8] = *b"kvbmcxl\0";
/// Version of the format. A program reads pools of its own major version only; feature bits say what a minor version adds.
pub const VERSION: (u16, u16) = (3, 0);
/// Compat feature bits that this program knows.
pub const KNOWN_COMPAT: u64 = 0;
/// Ro-compat feature bits that this program knows.
pub const KNOWN_RO_COMPAT: u64 = 0;
/// Incompat feature bits that this program knows.
pub const KNOWN_INCOMPAT: u64 = WIDE_STATS | METADATA_APART | SLOT_SEATS;
/// Incompat, since 2.1: a slot has [`STATS_LINES`] stats lines, not [`FIRST_STATS_LINES`]. The regions after them move.
pub const WIDE_STATS: u64 = 1;
/// Incompat: device 0 carries the metadata alone, as many bytes of it as the superblock says. The payload lies on the other devices.
pub const METADATA_APART: u64 = 2;
/// Incompat: each slot has a manager seat, in addition to those that the superblock counts.
pub const SLOT_SEATS: u64 = 4;

const REGION_ENTRIES: usize = 32;
const NAME_BYTES: usize = 104;

/// How the hosts of a pool see each other's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum CoherenceMode {
    /// Nothing is coherent between hosts: every publish writes through and every fetch flushes.
    #[default]
    Software = 1,
    /// One host only, or a device with real coherence between hosts: flushes are left out.
    Hardware = 2,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
struct RegionEntry {
    region: u32,
    reserved: u32,
    offset: u64,
    lines: u64,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
struct CellEntry {
    cell_bytes: u64,
    chunks: u64,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
struct DeviceEntry {
    id: [u8; 16],
    len_bytes: u64,
    name: [u8; NAME_BYTES],
}

#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
struct Raw {
    magic: [u8; 8],
    major: u16,
    minor: u16,
    crc: u32,
    uuid: [u8; 16],
    incarnation: u64,
    compat: u64,
    ro_compat: u64,
    incompat: u64,

    layout_digest: u64,
    len_bytes: u64,
    stripe_bytes: u64,
    chunk_bytes: u64,
    devices: u32,
    device_index: u32,
    seats: u32,
    slots: u32,
    locks: u32,
    objects: u32,
    coherence: u32,
    regions: u32,

    seat_table: [[u8; 16]; MAX_OPEN_SEATS],
    region_table: [RegionEntry; REGION_ENTRIES],
    device_table: [DeviceEntry; MAX_DEVICES],
    stripes: u32,
    cells_per_chunk: u32,
    cell_table: [CellEntry; CELL_CLASSES],
    metadata_bytes: u64,
    reserved: [u64; 118],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<RegionEntry>() == 24 && size_of::<DeviceEntry>() == 128 && size_of::<Raw>() == SUPERBLOCK_BYTES);
    assert!(offset_of!(Raw, major) == 8 && offset_of!(Raw, minor) == 10 && offset_of!(Raw, crc) == 12);
    assert!(offset_of!(Raw, uuid) == 16 && offset_of!(Raw, incarnation) == 32 && offset_of!(Raw, compat) == 40);
    assert!(offset_of!(Raw, ro_compat) == 48 && offset_of!(Raw, incompat) == 56 && offset_of!(Raw, layout_digest) == 64);
    assert!(offset_of!(Raw, len_bytes) == 72 && offset_of!(Raw, stripe_bytes) == 80 && offset_of!(Raw, chunk_bytes) == 88);
    assert!(offset_of!(Raw, devices) == 96 && offset_of!(Raw, device_index) == 100 && offset_of!(Raw, seats) == 104);
    assert!(offset_of!(Raw, slots) == 108 && offset_of!(Raw, locks) == 112 && offset_of!(Raw, objects) == 116);
    assert!(offset_of!(Raw, coherence) == 120 && offset_of!(Raw, regions) == 124 && offset_of!(Raw, seat_table) == 128);
    assert!(offset_of!(Raw, region_table) == 256 && offset_of!(Raw, device_table) == 1024 && offset_of!(Raw, stripes) == 3072);
    assert!(offset_of!(Raw, cells_per_chunk) == 3076 && offset_of!(Raw, cell_table) == 3080 && offset_of!(Raw, metadata_bytes) == 3144);
    assert!(offset_of!(Raw, reserved) == 3152);
    assert!(Region::ALL.len() <= REGION_ENTRIES);
};

/// One device as the superblock records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRecord {
    /// Random id, given by the format.
    pub id: [u8; 16],
    /// Size when it was formatted, in bytes.
    pub len_bytes: u64,
    /// Its path on the machine that formatted it; the last [`DeviceRecord::NAME_BYTES`] bytes of it when longer.
    pub name: String,
}

impl DeviceRecord {
    /// Longest name recorded, in bytes.
    pub const NAME_BYTES: usize = NAME_BYTES;
}

/// What a new superblock is made of.
#[derive(Clone, Debug)]
pub struct SuperblockParts {
    /// The pool's UUID.
    pub uuid: [u8; 16],
    /// Random number of this format, not zero.
    pub incarnation: u64,
    /// The layout.
    pub layout: Layout,
    /// How hosts see each other's writes.
    pub coherence: CoherenceMode,
    /// The machine of each seat; missing or none = bound at run time.
    pub seats: Vec<MachineId>,
    /// The devices in the order of their index.
    pub devices: Vec<DeviceRecord>,
}

/// A superblock that was checked: every number in it is within its bounds and agrees with the others.
#[derive(Clone, PartialEq, Eq)]
pub struct Superblock {
    raw: Box<Raw>,
    layout: Layout,
    coherence: CoherenceMode,
}

impl Superblock {
    /// A superblock of a new pool, for device 0; see [`Superblock::for_device`].
    ///
    /// # Errors
    /// [`Error::Invalid`] when the parts contradict each other.
    pub fn new(parts: &SuperblockParts) -> Result<Superblock> {
        let geometry = parts.layout.geometry();
        if parts.devices.len() != geometry.devices as usize || parts.seats.len() > geometry.seats as usize {
            return Err(Error::Invalid(format!(
                "{} devices and {} seat machines are given for a geometry of {} and {}",
                parts.devices.len(),
                parts.seats.len(),
                geometry.devices,
                geometry.seats
            )));
        }
        let mut raw: Box<Raw> = Box::new(Raw::zeroed());
        raw.magic = MAGIC;
        (raw.major, raw.minor) = VERSION;
        raw.uuid = parts.uuid;
        raw.incarnation = parts.incarnation;
        raw.incompat = if geometry.stats_lines as usize == STATS_LINES { WIDE_STATS } else { 0 };
        raw.metadata_bytes = geometry.metadata_bytes;
        if geometry.metadata_bytes > 0 {
            raw.incompat |= METADATA_APART;
        }
        if geometry.slot_seats {
            raw.incompat |= SLOT_SEATS;
        }
        raw.layout_digest = parts.layout.digest();
        raw.len_bytes = geometry.len_bytes;
        raw.stripe_bytes = geometry.stripe_bytes;
        raw.chunk_bytes = geometry.chunk_bytes;
        raw.devices = geometry.devices;
        raw.seats = geometry.seats;
        raw.slots = geometry.slots;
        raw.locks = geometry.locks;
        raw.objects = geometry.objects;
        (raw.stripes, raw.cells_per_chunk) = (geometry.stripes, geometry.cells_per_chunk);
        raw.cell_table = geometry.cells.map(|class| CellEntry { cell_bytes: class.cell_bytes, chunks: class.chunks });
        raw.coherence = parts.coherence as u32;
        for (entry, machine) in raw.seat_table.iter_mut().zip(&parts.seats) {
            *entry = machine.0;
        }
        raw.regions = region_entries(&parts.layout, &mut raw.region_table);
        for (entry, device) in raw.device_table.iter_mut().zip(&parts.devices) {
            *entry = DeviceEntry { id: device.id, len_bytes: device.len_bytes, name: [0; NAME_BYTES] };
            let name = tail(&device.name, NAME_BYTES).as_bytes();
            entry.name[..name.len()].copy_from_slice(name);
        }
        raw.crc = crc(&raw);
        let (layout, coherence) = check(&raw).map_err(Error::Invalid)?;
        Ok(Superblock { raw, layout, coherence })
    }

    /// The copy for device `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when there is no such device.
    pub fn for_device(&self, index: usize) -> Result<Superblock> {
        if index >= self.raw.devices as usize {
            return Err(Error::OutOfRange { what: "device", offset: index as u64, len_bytes: 1, limit_bytes: self.raw.devices.into() });
        }
        let mut copy = self.clone();
        copy.raw.device_index = index as u32;
        copy.raw.crc = crc(&copy.raw);
        Ok(copy)
    }

    /// Reads a superblock from the first bytes of `device` (a name for the error). Any input is answered, in bounded time.
    ///
    /// # Errors
    /// [`Error::NotAPool`] with the reason: empty, foreign, truncated, written by a newer version, damaged, or contradicting itself.
    pub fn decode(device: &str, bytes: &[u8]) -> Result<Superblock> {
        let decode = || {
            let Some(bytes) = bytes.get(..SUPERBLOCK_BYTES) else {
                return Err(format!("truncated: {} bytes are fewer than the {SUPERBLOCK_BYTES} of a superblock", bytes.len()));
            };
            if bytes.iter().all(|&byte| byte == 0) {
                return Err("empty: there is no pool on it yet, format it first (cxlctl format)".into());
            }
            if bytes[..MAGIC.len()] != MAGIC {
                return Err("foreign: it holds something that is not a pool".into());
            }
            let mut raw: Box<Raw> = Box::new(Raw::zeroed());
            bytemuck::bytes_of_mut(&mut *raw).copy_from_slice(bytes);
            let (layout, coherence) = check(&raw)?;
            Ok(Superblock { raw, layout, coherence })
        };
        decode().map_err(|reason| Error::NotAPool { device: device.into(), reason })
    }

    /// The bytes as they lie on the device.
    pub fn encode(&self) -> &[u8] {
        bytemuck::bytes_of(&*self.raw)
    }

    /// The pool's UUID.
    pub fn uuid(&self) -> &[u8; 16] {
        &self.raw.uuid
    }

    /// A random number, new with every format.
    pub fn incarnation(&self) -> u64 {
        self.raw.incarnation
    }

    /// Major and minor version of the format.
    pub fn version(&self) -> (u16, u16) {
        (self.raw.major, self.raw.minor)
    }

    /// Compat, ro-compat and incompat feature bits.
    pub fn features(&self) -> [u64; 3] {
        [self.raw.compat, self.raw.ro_compat, self.raw.incompat]
    }

    /// Ro-compat bits that this program does not know. Unless zero, it must not write to the pool.
    pub fn unknown_ro_compat(&self) -> u64 {
        self.raw.ro_compat & !KNOWN_RO_COMPAT
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How hosts see each other's writes.
    pub fn coherence(&self) -> CoherenceMode {
        self.coherence
    }

    /// Index of the device that this copy is for.
    pub fn device_index(&self) -> usize {
        self.raw.device_index as usize
    }

    /// The machine of each manager seat; [`MachineId::is_none`] = bound at run time.
    pub fn seats(&self) -> Vec<MachineId> {
        self.raw.seat_table[..self.raw.seats as usize].iter().copied().map(MachineId).collect()
    }

    /// The devices, in the order of their index.
    pub fn devices(&self) -> Vec<DeviceRecord> {
        self.raw.device_table[..self.raw.devices as usize]
            .iter()
            .map(|entry| DeviceRecord { id: entry.id, len_bytes: entry.len_bytes, name: name_of(entry) })
            .collect()
    }

    /// True when `other` is a copy of this superblock for another device (or the same).
    pub fn is_copy_of(&self, other: &Superblock) -> bool {
        let normal = |superblock: &Superblock| {
            let mut raw = superblock.raw.clone();
            (raw.device_index, raw.crc) = (0, 0);
            raw
        };
        normal(self) == normal(other)
    }

    /// UUID and incarnation in line 0 of a superblock, if its magic is right. Nothing else is checked.
    pub fn identity_in(line: &crate::coherence::Line) -> Option<([u8; 16], u64)> {
        let mut raw: Box<Raw> = Box::new(Raw::zeroed());
        bytemuck::bytes_of_mut(&mut *raw)[..line.0.len()].copy_from_slice(&line.0);
        (raw.magic == MAGIC).then_some((raw.uuid, raw.incarnation))
    }
}

impl std::fmt::Debug for Superblock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Superblock")
            .field("uuid", &uuid_text(self.uuid()))
            .field("incarnation", &self.incarnation())
            .field("version", &self.version())
            .field("features", &self.features())
            .field("geometry", self.layout.geometry())
            .field("coherence", &self.coherence)
            .field("device_index", &self.device_index())
            .field("seats", &self.seats())
            .field("devices", &self.devices())
            .finish()
    }
}

/// A UUID in its usual form.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Checks everything after the magic, of a pool of this version. The version comes before the CRC, because a newer version may keep its
/// CRC elsewhere.
fn check(raw: &Raw) -> std::result::Result<(Layout, CoherenceMode), String> {
    if raw.major != VERSION.0 {
        let age = if raw.major > VERSION.0 { "newer" } else { "older" };
        return Err(format!("format version {}.{} is {age} than this program's {}.{}", raw.major, raw.minor, VERSION.0, VERSION.1));
    }
    let (geometry, coherence) = check_numbers(raw)?;
    let stripes = Stripes::of(&geometry).map_err(|error| format!("malformed geometry: {error}"))?;
    let layout = Layout::new(geometry).map_err(|error| format!("malformed geometry: {error}"))?;
    let mut table = [RegionEntry::zeroed(); REGION_ENTRIES];
    if raw.layout_digest != layout.digest() || region_entries(&layout, &mut table) != raw.regions || table != raw.region_table {
        return Err("its layout is not the one that this program computes from its geometry: use the version that formatted it".into());
    }
    check_tables(raw, &stripes)?;
    Ok((layout, coherence))
}

/// Checks the checksum, and the numbers that every version so far has at these places.
fn check_numbers(raw: &Raw) -> std::result::Result<(Geometry, CoherenceMode), String> {
    if raw.crc != crc(raw) {
        return Err("damaged: the superblock's checksum differs (a torn format, or a bad device)".into());
    }
    let unknown = raw.incompat & !KNOWN_INCOMPAT;
    if unknown != 0 {
        return Err(format!("it uses features (incompat bits {unknown:#x}) that this program does not know: use a newer one"));
    }
    if raw.uuid == [0; 16] || raw.incarnation == 0 {
        return Err("malformed: UUID or incarnation is zero".into());
    }
    let coherence = match raw.coherence {
        mode if mode == CoherenceMode::Software as u32 => CoherenceMode::Software,
        mode if mode == CoherenceMode::Hardware as u32 => CoherenceMode::Hardware,
        mode => return Err(format!("malformed: coherence mode {mode} is unknown")),
    };
    if (raw.incompat & METADATA_APART != 0) != (raw.metadata_bytes > 0) {
        return Err(format!("malformed: {} bytes of metadata apart, and incompat bits {:#x}", raw.metadata_bytes, raw.incompat));
    }
    let geometry = Geometry {
        devices: raw.devices,
        metadata_bytes: raw.metadata_bytes,
        stripe_bytes: raw.stripe_bytes,
        len_bytes: raw.len_bytes,
        seats: raw.seats,
        slot_seats: raw.incompat & SLOT_SEATS != 0,
        slots: raw.slots,
        locks: raw.locks,
        objects: raw.objects,
        chunk_bytes: raw.chunk_bytes,
        stats_lines: if raw.incompat & WIDE_STATS != 0 { STATS_LINES as u32 } else { FIRST_STATS_LINES as u32 },
        stripes: raw.stripes,
        cells_per_chunk: raw.cells_per_chunk,
        cells: raw.cell_table.map(|entry| CellClass { cell_bytes: entry.cell_bytes, chunks: entry.chunks }),
    };
    Ok((geometry, coherence))
}

/// Checks the tables of devices and seats of a geometry that is within its bounds.
fn check_tables(raw: &Raw, stripes: &Stripes) -> std::result::Result<(), String> {
    if raw.device_index >= raw.devices {
        return Err(format!("malformed: device index {} of {}", raw.device_index, raw.devices));
    }
    let (devices, unused_devices) = raw.device_table.split_at(raw.devices as usize);
    let (seats, unused_seats) = raw.seat_table.split_at(raw.seats as usize);
    if unused_devices.iter().any(|entry| *entry != DeviceEntry::zeroed()) || unused_seats.iter().any(|seat| *seat != [0; 16]) {
        return Err("malformed: a device or seat behind the last".into());
    }
    for (index, entry) in devices.iter().enumerate() {
        if entry.id == [0; 16] || devices[..index].iter().any(|other| other.id == entry.id) {
            return Err(format!("malformed: the id of device {index} is zero or used twice"));
        }
        if entry.len_bytes < stripes.device_len_bytes(index) {
            return Err(format!("malformed: device {index} of {} bytes is smaller than its share of the pool", entry.len_bytes));
        }
    }
    let named = |seat: &[u8; 16]| *seat != [0; 16];
    match seats.iter().enumerate().find(|(index, seat)| named(seat) && seats[..*index].contains(seat)) {
        Some((index, _)) => Err(format!("malformed: seat {index} belongs to a machine that has another seat")),
        None => Ok(()),
    }
}

fn region_entries(layout: &Layout, table: &mut [RegionEntry; REGION_ENTRIES]) -> u32 {
    for (entry, span) in table.iter_mut().zip(layout.spans()) {
        *entry = RegionEntry { region: span.region as u32, reserved: 0, offset: span.offset, lines: span.lines };
    }
    layout.spans().len() as u32
}

/// CRC32C of the superblock with its CRC field taken as zero.
fn crc(raw: &Raw) -> u32 {
    let bytes = bytemuck::bytes_of(raw);
    let at = std::mem::offset_of!(Raw, crc);
    let crc = crc32c::crc32c(&bytes[..at]);
    crc32c::crc32c_append(crc32c::crc32c_append(crc, &[0; 4]), &bytes[at + 4..])
}

fn name_of(entry: &DeviceEntry) -> String {
    let len = entry.name.iter().position(|&byte| byte == 0).unwrap_or(NAME_BYTES);
    // The name is for people only: whatever is in it must not garble a terminal.
    escaped(&String::from_utf8_lossy(&entry.name[..len])).into_owned()
}

/// The longest end of `text` that fits into `len` bytes.
fn tail(text: &str, len: usize) -> &str {
    let least = text.len().saturating_sub(len);
    let start = (least..=text.len()).find(|&start| text.is_char_boundary(start)).unwrap_or(text.len());
    &text[start..]
}

#[cfg(test)]
mod tests;
