// SPDX-License-Identifier: Apache-2.0
//! Checks of checks, over a pool in ordinary memory.

mod names;
mod planted;

use super::*;
use crate::cache::survey::CacheView;
use crate::cache::{BlockKey, Namespace};
use crate::coherence::Coherence;
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use crate::line::{Line, Lines, with_line_of};
use crate::media::*;
use crate::platform::MachineId;
use crate::pool::write_regions;
use bytemuck::Zeroable;
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

const UUID: [u8; 16] = *b"a pool to check!";
const MACHINES: [[u8; 16]; 2] = [[1; 16], [2; 16]];

/// Coherent memory: every store is there.
struct Ram(Mutex<Vec<u8>>);

impl Ram {
    fn at(&self, offset: u64, len_bytes: u64) -> Result<std::ops::Range<usize>> {
        let limit_bytes = self.len_bytes();
        match offset.checked_add(len_bytes) {
            Some(end) if end <= limit_bytes => Ok(offset as usize..end as usize),
            _ => Err(Error::OutOfRange { what: "test memory", offset, len_bytes, limit_bytes }),
        }
    }
}

impl Coherence for Ram {
    fn len_bytes(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        let at = self.at(offset, LINE_BYTES as u64)?;
        Ok(Line(self.0.lock().unwrap()[at].try_into().unwrap()))
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.copy_in(offset, &line.0)
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        self.at(offset, LINE_BYTES as u64).map(drop)
    }

    fn fence_stores(&self) {}
    fn fence_all(&self) {}
    fn fence_loads(&self) {}

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.at(offset, len_bytes).map(drop)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        let at = self.at(offset, source.len() as u64)?;
        self.0.lock().unwrap()[at].copy_from_slice(source);
        Ok(())
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        let at = self.at(offset, destination.len() as u64)?;
        destination.copy_from_slice(&self.0.lock().unwrap()[at]);
        Ok(())
    }

    fn address(&self, _: u64, _: u64) -> Option<NonNull<u8>> {
        None
    }
}

/// A formatted pool whose metadata is small, and where it all lies.
fn formatted() -> Lines {
    let mut geometry = Geometry { seats: 2, slots: 3, locks: 20, objects: 8, chunk_bytes: 1 << 16, ..Geometry::with_len(4 << 20) };
    (geometry.stripes, geometry.cells_per_chunk) = (2, 4);
    geometry.cells[0] = CellClass { cell_bytes: 4096, chunks: 3 };
    geometry.cells[1] = CellClass { cell_bytes: 8192, chunks: 2 };
    let layout = Arc::new(Layout::new(geometry).unwrap());
    let lines = Lines::new(Arc::new(Ram(Mutex::new(vec![0; 4 << 20]))), layout, &UUID, 1);
    write_regions(&lines).unwrap();
    lines
}

fn seats() -> [MachineId; 1] {
    [MachineId(MACHINES[0])]
}

/// A pool in use: seat 0 manages, two hosts have joined, locks and objects and blocks are there.
fn in_use() -> Lines {
    let lines = formatted();
    let geometry = *lines.layout().geometry();
    lines.publish(0, Seat { epoch: 3, beat: 9, machine: MACHINES[0], ..Seat::default() }).unwrap();
    for line in 0..geometry.grant_lines() {
        lines.publish(line, GrantLine { tag: 3, ..GrantLine::default() }).unwrap();
    }
    for line in 0..geometry.bindings() {
        lines.publish(line, Binding { tag: 3, ..Binding::default() }).unwrap();
    }
    for slot in 0..2u32 {
        let (machine, nonce) = (MACHINES[slot as usize], [7 + slot as u8; 16]);
        let index = u64::from(slot);
        lines.publish(index, Binding { tag: 3, incarnation: 2, machine, nonce, ..Binding::default() }).unwrap();
        let identity =
            Identity { incarnation: 2, state: Identity::LIVE, acknowledged: 1, drained: 1, machine, nonce, ..Identity::default() };
        lines.publish(index, identity).unwrap();
        lines.publish(index * geometry.summary_lines(), Summary { incarnation: 2, heartbeat: 5, ..Summary::default() }).unwrap();
        for line in 0..geometry.request_lines() {
            let number = index * geometry.request_lines() + line;
            lines.publish(number, RequestLine { incarnation: 2, ..RequestLine::default() }).unwrap();
        }
    }
    let mut grants = GrantLine { tag: 3, ..GrantLine::default() };
    grants.grants[1] = Grant { number: 4, incarnation: 2, request: 1, slot: 1, flags: 0 };
    lines.publish(0, grants).unwrap();
    let mut requests = RequestLine { incarnation: 2, ..RequestLine::default() };
    requests.requests[1] = Request { number: 1, flags: Request::WANT };
    lines.publish(geometry.request_lines(), requests).unwrap();
    // An object of slot 1 under the object lock, pointing into its chunk.
    let name = b"root";
    let cells = u64::from(geometry.objects);
    let cell = u64::from(crc32c::crc32c(name)) % cells;
    let mut value = ObjectValue {
        offset: lines.layout().chunk_offset(2).unwrap(),
        len_bytes: 100,
        state: ObjectValue::LIVE,
        name_len: 4,
        ..ObjectValue::default()
    };
    value.name[..4].copy_from_slice(name);
    let record = Record { grant: 4, version: 1, incarnation: 2, data: bytemuck::cast(value), ..Record::zeroed() };
    lines.publish(geometry.records() + geometry.lock_table_records() + cell, record).unwrap();
    // Slot 1 has chunk 2, cut into blocks, and a block of two chunks in 4 and 5.
    let mut claim = Claim { incarnation: 2, ..Claim::zeroed() };
    claim.bits[0] = 1 << 2 | 1 << 4 | 1 << 5;
    lines.publish(lines.layout().claim_lines(), claim).unwrap();
    let head = ChunkHead { slot: 1, incarnation: 2, ..ChunkHead::default() };
    lines.publish(2, ChunkHead { state: ChunkHead::BLOCKS, block_bytes: 192, ..head }).unwrap();
    lines.publish(4, ChunkHead { state: ChunkHead::RUN, block_bytes: 100_000, run: 2, ..head }).unwrap();
    lines.publish(5, ChunkHead { state: ChunkHead::INSIDE, run: 4, ..head }).unwrap();
    let mut keep = KeepMap { incarnation: 2, ..KeepMap::zeroed() };
    keep.bits[0] = 1;
    lines.publish(4 * geometry.keep_lines(), keep).unwrap();
    keep.bits[0] = 0b101;
    lines.publish(2 * geometry.keep_lines(), keep).unwrap();
    cells_in_use(&lines);
    lines
}

const KEY: BlockKey = BlockKey([5; 16]);
const NAMESPACE: Namespace = Namespace([6; 16]);

/// Slot 0 has cell chunk 0, with nothing in it, and slot 1 chunk 1: a block in cell 4, which it pins, and one on its way into cell 5.
fn cells_in_use(lines: &Lines) {
    for slot in 0..2 {
        let mut claim = CellClaim { incarnation: 2, ..CellClaim::zeroed() };
        claim.set(slot, true);
        lines.publish(slot as u64, claim).unwrap();
        for cell in 4 * slot as u64..4 * slot as u64 + 4 {
            lines.publish(cell, Descriptor { owner: slot as u16, incarnation: 2, seq: cell + 1, ..Descriptor::default() }).unwrap();
        }
    }
    lines.publish(4, block(Descriptor::READY, KEY)).unwrap();
    lines.publish(5, block(Descriptor::WRITING, BlockKey([9; 16]))).unwrap();
    let (home, mut line) = (home(lines), HintLine::default());
    line.set(0, Hint::Cell { fingerprint: CacheView::fingerprint(lines.layout().geometry(), &block(2, KEY)), cell: 4 });
    lines.publish(home, line).unwrap();
    lines.publish(1, PinLine { incarnation: 2, nibbles: [0xa << 16, 0, 0, 0, 0, 0, 0], ..PinLine::default() }).unwrap();
    lines.publish(1, Ask { incarnation: 2, number: 1, what: Ask::CLEAR, ..Ask::default() }).unwrap();
}

/// A block of slot 1.
fn block(state: u8, key: BlockKey) -> Descriptor {
    Descriptor { state, owner: 1, incarnation: 2, len_bytes: 4000, seq: 100, key: key.0, namespace: NAMESPACE.0, ..Descriptor::default() }
}

/// Home line of the block in cell 4.
fn home(lines: &Lines) -> u64 {
    CacheView::load(lines).unwrap().why(NAMESPACE, KEY, false).unwrap().home_line
}

fn rules(lines: &Lines) -> Vec<&'static str> {
    check(lines, &seats()).unwrap().findings.iter().map(|found| found.rule).collect()
}

fn is_found(report: &Report, region: Region, index: u64) -> bool {
    report.findings.iter().any(|found| match found.place {
        FindingPlace::Lines { region: place, first, count } => place == region && (first..first + count).contains(&index),
        FindingPlace::Superblock(_) => false,
    })
}

/// Flips one bit of a line in the memory.
fn flip(lines: &Lines, region: Region, index: u64, bit: usize) {
    let offset = lines.layout().line_offset(region, index).unwrap();
    let mut line = lines.memory().load_line(offset).unwrap();
    line.0[bit / 8] ^= 1 << (bit % 8);
    lines.memory().write_line(offset, &line).unwrap();
}

#[test]
fn fresh_and_used_pools_are_clean() {
    assert_eq!(rules(&formatted()), [""; 0]);
    assert_eq!(rules(&in_use()), [""; 0]);
}

#[test]
fn every_line_that_is_damaged_is_found_and_most_are_repaired_without_loss() {
    let lines = in_use();
    for span in lines.layout().spans().to_vec() {
        for index in (0..span.lines).filter(|index| *index < 12 || index % 61 == 0) {
            let offset = lines.layout().line_offset(span.region, index).unwrap();
            let good = lines.memory().load_line(offset).unwrap();
            flip(&lines, span.region, index, 37);
            let report = check(&lines, &seats()).unwrap();
            assert!(is_found(&report, span.region, index), "{:?} {index}", span.region);
            assert!(!report.is_clean());
            lines.memory().write_line(offset, &good).unwrap();
        }
    }
    assert_eq!(rules(&lines), [""; 0]);
}

#[test]
fn a_repair_with_loss_accepted_leaves_no_damaged_line() {
    for region in Region::ALL {
        for index in [0, 1, 2] {
            let lines = in_use();
            if index >= lines.layout().span(region).lines {
                continue;
            }
            flip(&lines, region, index, 100);
            let repaired = repair(&lines, &seats(), true).unwrap();
            assert!(!repaired.before.is_clean());
            let left: Vec<_> = repaired.after.findings.iter().filter(|found| found.severity == Severity::Error).collect();
            assert!(left.is_empty(), "{region:?} {index}: {left:?}");
        }
    }
}

#[test]
fn what_may_hide_a_newer_value_is_not_repaired_without_loss() {
    let lines = in_use();
    let geometry = *lines.layout().geometry();
    for (region, index) in [
        (Region::Seat, 0),
        (Region::Grant, 0),
        (Region::Binding, 1),
        (Region::Intent, 0),
        (Region::ChunkHead, 2),
        (Region::Record, geometry.records() + geometry.lock_table_records()),
    ] {
        let lines = in_use();
        flip(&lines, region, index, 44);
        let before = lines.fetch_raw(lines.layout().line_offset(region, index).unwrap()).unwrap();
        let repaired = repair(&lines, &seats(), false).unwrap();
        assert!(is_found(&repaired.after, region, index), "{region:?} {index}");
        assert_eq!(lines.fetch_raw(lines.layout().line_offset(region, index).unwrap()).unwrap(), before, "{region:?} {index} was touched");
    }
}

#[test]
fn an_outvoted_copy_is_written_again_below_the_one_that_counts() {
    let lines = in_use();
    let geometry = *lines.layout().geometry();
    // Seat 1 managed before, under epoch 2, and its own copy is the damaged one.
    lines.publish(0, Claimant { ballot: 1, machine: MACHINES[1], ..Claimant::default() }).unwrap();
    lines.publish(1, owner_of_seat_1()).unwrap();
    let seat = Seat { epoch: 2, beat: 1, machine: MACHINES[1], session: [8; 16], generation: 1, ..Seat::default() };
    lines.publish(1, seat).unwrap();
    flip(&lines, Region::Grant, geometry.grant_lines(), 200);
    let repaired = repair(&lines, &seats(), false).unwrap();
    assert!(repaired.after.is_clean(), "{:?}", repaired.after.findings);
    let copy: GrantLine = lines.fetch(geometry.grant_lines()).unwrap();
    let best: GrantLine = lines.fetch(0).unwrap();
    assert_eq!((copy.tag, copy.grants), (2, best.grants));
}

/// Place 0's copy of who has seat 1, under the first ballot.
fn owner_of_seat_1() -> SeatClaim {
    SeatClaim { tag: 1, generation: 1, machine: MACHINES[1], session: [8; 16], ..SeatClaim::default() }
}

#[test]
fn a_repaired_vote_keeps_the_owner_of_a_seat_and_outvotes_what_was_lost() {
    let lines = in_use();
    let seats = lines.layout().geometry().seats;
    lines.publish(0, Claimant { ballot: 1, machine: MACHINES[1], ..Claimant::default() }).unwrap();
    lines.publish(1, owner_of_seat_1()).unwrap();
    lines.publish(1, Seat { machine: MACHINES[1], session: [8; 16], generation: 1, ..Seat::default() }).unwrap();
    assert_eq!(rules(&lines), Vec::<&str>::new());
    // The only copy: the seat's own line is the witness, and the repair may hide a newer owner.
    flip(&lines, Region::SeatClaim, 1, 300);
    assert!(repair(&lines, &self::seats(), false).unwrap().after.count(Severity::Error) > 0);
    repair(&lines, &self::seats(), true).unwrap();
    let copy: SeatClaim = lines.fetch(1).unwrap();
    assert_eq!((copy.tag, copy.generation, copy.session), (1, 1, [8; 16]));
    // A copy of a place that never voted holds nothing that counts.
    flip(&lines, Region::SeatClaim, u64::from(seats) * 3 + 1, 300);
    assert!(repair(&lines, &self::seats(), false).unwrap().after.is_clean());
    // A lost ballot is outvoted by far, and the door of a place stays closed.
    flip(&lines, Region::Claimant, 0, 40);
    flip(&lines, Region::Splitter, 1, 40);
    assert!(repair(&lines, &self::seats(), true).unwrap().after.is_clean());
    let (claimant, door): (Claimant, Splitter) = (lines.fetch(0).unwrap(), lines.fetch(1).unwrap());
    assert!(claimant.ballot > 1 << 16 && claimant.machine == [0; 16], "{claimant:?}");
    assert_eq!(door.closed, 1);
}

#[test]
fn a_repaired_fence_row_forgets_no_fence() {
    let lines = in_use();
    let mut row = FenceLine::default();
    row.fenced[1] = 2;
    lines.publish(0, row).unwrap();
    flip(&lines, Region::Fence, 0, 90);
    assert!(repair(&lines, &seats(), false).unwrap().after.count(Severity::Error) == 0);
    let row: FenceLine = lines.fetch(0).unwrap();
    assert!(row.fenced[..2] == [2, 2] && row.fenced[2] == 0, "{row:?}");
}

/// Breaks a line and repairs the pool; nothing may be left that is worse than a note.
fn repaired<T: MediaLine>(lines: &Lines, index: u64) -> T {
    flip(lines, T::REGION, index, 150);
    let repaired = repair(lines, &seats(), false).unwrap();
    assert!(repaired.after.is_clean() && repaired.lines_written == 1, "{:?}", repaired.after.findings);
    lines.fetch(index).unwrap()
}

#[test]
fn repaired_lines_of_the_cache_hold_back_more_and_serve_nothing() {
    let lines = in_use();
    // The next owner trusts only stamps of a claimant, and this is one of no host.
    let descriptor: Descriptor = repaired(&lines, 4);
    assert_eq!((descriptor.state, descriptor.owner, descriptor.incarnation), (Descriptor::FREE, 0, 0));
    let pins: PinLine = repaired(&lines, 1);
    assert!((0..20).all(|cell| pins.nibble(cell) & PinLine::PINNED != 0) && pins.incarnation == 2);
    let claim: CellClaim = repaired(&lines, 1);
    assert_eq!((0..5).filter(|&chunk| claim.has(chunk)).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(claim.incarnation, 2);
    assert_eq!(repaired::<CellClaim>(&lines, 2), CellClaim { crc: lines.fetch::<CellClaim>(2).unwrap().crc, ..CellClaim::zeroed() });
    assert_eq!(repaired::<Ask>(&lines, 1).number, 0);
}

#[test]
fn a_repaired_free_box_frees_nothing_twice_and_numbers_nothing_twice() {
    let lines = in_use();
    let block = lines.layout().data_offset();
    let message = FreeBox { incarnation: 2, receiver: 2, sequence: 7, offsets: [block, 0, 0, 0, 0, 0], ..FreeBox::default() };
    lines.publish(1, message).unwrap();
    lines.publish(3, FreeAck { incarnation: 2, sender: 2, sequence: 6, ..FreeAck::default() }).unwrap();
    let repaired = |region, index| {
        flip(&lines, region, index, 150);
        let repaired = repair(&lines, &seats(), true).unwrap();
        assert_eq!((repaired.after.count(Severity::Error), repaired.lines_written), (0, 1), "{:?}", repaired.after.findings);
    };
    repaired(Region::FreeAck, 3);
    let ack: FreeAck = lines.fetch(3).unwrap();
    assert_eq!((ack.incarnation, ack.sender, ack.sequence), (2, 2, 7), "its blocks may be free already");
    repaired(Region::FreeBox, 1);
    let empty: FreeBox = lines.fetch(1).unwrap();
    assert_eq!((empty.sequence, empty.offsets), (7 + crate::alloc::LOST_NUMBERS, [0; 6]));
}

#[test]
fn a_claim_line_of_a_host_that_is_gone_is_repaired_with_what_others_have_as_well() {
    let lines = in_use();
    let mut row = FenceLine::default();
    row.fenced[0] = 2;
    lines.publish(0, row).unwrap();
    let claim: CellClaim = {
        flip(&lines, Region::CellClaim, 0, 150);
        repair(&lines, &seats(), false).unwrap();
        lines.fetch(0).unwrap()
    };
    // The line may have told of a chunk that slot 1 has adopted: late lines of slot 0 may still turn up on it.
    assert_eq!((0..5).filter(|&chunk| claim.has(chunk)).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(rules(&lines).iter().filter(|rule| **rule == "cell_claim.two_owners").count(), 0);
}

#[test]
fn a_repaired_hint_line_ends_no_probe_that_went_on() {
    let lines = in_use();
    let home = home(&lines);
    let per_stripe = lines.layout().geometry().hint_lines_per_stripe();
    let behind = home / per_stripe * per_stripe + (home + 1) % per_stripe;
    assert_eq!(repaired::<HintLine>(&lines, home).get(0), Hint::Empty);
    let mut line = HintLine::default();
    line.set(0, Hint::Cell { fingerprint: CacheView::fingerprint(lines.layout().geometry(), &block(2, KEY)), cell: 4 });
    lines.publish(behind, line).unwrap();
    assert!(!CacheView::load(&lines).unwrap().why(NAMESPACE, KEY, false).unwrap().is_hit());
    let tombs: HintLine = repaired(&lines, home);
    assert!(tombs.iter().all(|hint| hint == Hint::Tomb));
    assert!(CacheView::load(&lines).unwrap().why(NAMESPACE, KEY, false).unwrap().is_hit());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever stands in the metadata: an answer, in bounded time, and every line that was hit is in it.
    #[test]
    fn random_damage_is_found(hits in proptest::collection::vec((0usize..Region::ALL.len(), any::<u64>(), 0usize..512), 1..40)) {
        let lines = in_use();
        let mut hit = std::collections::HashMap::new();
        for (region, index, bit) in hits {
            let span = lines.layout().spans()[region];
            flip(&lines, span.region, index % span.lines, bit);
            hit.entry((span.region, index % span.lines, bit)).and_modify(|odd: &mut bool| *odd = !*odd).or_insert(true);
        }
        let report = check(&lines, &seats()).unwrap();
        for (region, index, _) in hit.into_iter().filter(|(_, odd)| *odd).map(|(place, _)| place) {
            prop_assert!(is_found(&report, region, index), "{region:?} {index}");
        }
        repair(&lines, &seats(), true).unwrap();
    }

    /// Random bytes that verify: the numbers in them are anything.
    #[test]
    fn random_sealed_lines_are_survived(
        hits in proptest::collection::vec(
            (0usize..Region::ALL.len(), any::<u64>(), proptest::array::uniform32(any::<u16>()), any::<bool>()),
            1..60,
        ),
    ) {
        let lines = in_use();
        for (region, index, words, small) in hits {
            let span = lines.layout().spans()[region];
            let index = index % span.lines;
            let mut raw = Line::ZERO;
            for (bytes, word) in raw.0.chunks_exact_mut(2).zip(words) {
                // Small numbers get past the first checks more often.
                bytes.copy_from_slice(&(if small { word & 7 } else { word }).to_le_bytes());
            }
            let sealed = with_line_of!(span.region, Form => lines.seal::<Form>(index, bytemuck::cast(raw)));
            lines.memory().write_line(span.offset + index * LINE_BYTES as u64, &sealed).unwrap();
        }
        check(&lines, &seats()).unwrap();
        for span in lines.layout().spans() {
            for index in (0..span.lines).step_by(7) {
                let line = lines.fetch_raw(lines.layout().line_offset(span.region, index).unwrap()).unwrap();
                describe(&lines, span.region, index, &line);
            }
        }
        repair(&lines, &seats(), true).unwrap();
    }
}
