// SPDX-License-Identifier: Apache-2.0
//! One contradiction at a time, planted into a sound pool; each has to be noticed by the rule that is about it.

use super::*;
use crate::limits::{INTENTS, MAX_NUMBER};

/// Publishes something wrong into a pool in use, and the rule that has to notice.
macro_rules! planted {
    ($($name:ident: $rule:literal, $plant:expr;)*) => {
        $(#[test]
        fn $name() {
            let lines = in_use();
            let plant: fn(&Lines) -> Result<()> = $plant;
            plant(&lines).unwrap();
            let report = check(&lines, &seats()).unwrap();
            assert!(report.findings.iter().any(|found| found.rule == $rule), "{:?}", report.findings);
        })*
    };
}

fn at(lines: &Lines, of: fn(&Geometry) -> u64) -> u64 {
    of(lines.layout().geometry())
}

planted! {
    epoch_of_another_seat: "seat.epoch", |lines| lines.publish(0, Seat { epoch: 4, machine: MACHINES[0], ..Seat::default() });
    seat_of_another_machine: "seat.machine", |lines| lines.publish(0, Seat { epoch: 3, machine: MACHINES[1], ..Seat::default() });
    seat_of_no_machine: "seat.machine", |lines| lines.publish(1, Seat { epoch: 2, machine: MACHINES[1], ..Seat::default() });
    tag_above_the_epoch: "copy.tag", |lines| lines.publish(1, GrantLine { tag: 5, ..GrantLine::default() });
    tag_of_another_seat: "copy.tag", |lines| lines.publish(1, GrantLine { tag: 2, ..GrantLine::default() });
    fence_ahead_of_every_binding: "fence.ahead", |lines| {
        let mut row = FenceLine::default();
        row.fenced[0] = 9;
        lines.publish(0, row)
    };
    death_without_a_fence: "death.unfenced", |lines| {
        let mut row = DeathLine::default();
        row.dead[0] = 2;
        lines.publish(1, row)
    };
    identity_above_its_binding: "identity.unbound", |lines| {
        let identity = lines.fetch::<Identity>(1)?;
        lines.publish(1, Identity { incarnation: 3, ..identity })
    };
    identity_of_another_machine: "identity.foreign", |lines| {
        let identity = lines.fetch::<Identity>(1)?;
        lines.publish(1, Identity { machine: [9; 16], ..identity })
    };
    lines_of_an_unbound_slot: "line.unbound", |lines| {
        lines.publish(2 * at(lines, Geometry::summary_lines), Summary { incarnation: 1, ..Summary::default() })
    };
    grant_to_an_unbound_incarnation: "grant.unbound", |lines| {
        let mut line = lines.fetch::<GrantLine>(1)?;
        line.grants[0] = Grant { number: 1, incarnation: 7, slot: 1, ..Grant::default() };
        lines.publish(1, line)
    };
    record_under_a_grant_that_was_never_decided: "grant.undecided", |lines| {
        lines.publish(at(lines, Geometry::lock_table_records), Record { grant: 5, version: 1, incarnation: 2, ..Record::zeroed() })
    };
    record_of_a_second_holder: "grant.two_holders", |lines| {
        lines.publish(at(lines, Geometry::lock_table_records) + 7, Record { grant: 4, version: 1, incarnation: 2, ..Record::zeroed() })
    };
    intent_outside_its_structure: "intent.range", |lines| {
        let intent = Intent { incarnation: 2, lock: 1, grant: 4, count: 1, lines: [9999; 10], ..Intent::default() };
        lines.publish(INTENTS as u64 + 1, intent)
    };
    intent_left_open: "intent.open", |lines| {
        let intent = Intent { incarnation: 2, lock: 1, grant: 4, count: 1, lines: [3; 10], ..Intent::default() };
        lines.publish(INTENTS as u64 + 1, intent)
    };
    reserved_lock_allocated: "lock_table.range", |lines| {
        let mut line = lines.fetch::<GrantLine>(0)?;
        line.grants[0] = Grant { number: 1, incarnation: 2, slot: 0, ..Grant::default() };
        lines.publish(0, line)?;
        lines.publish(0, Record { grant: 1, version: 1, incarnation: 2, data: [3; RECORD_BYTES], ..Record::zeroed() })
    };
    object_out_of_reach: "object.unreachable", |lines| move_object(lines, 7);
    object_outside_the_chunks: "object.offset", |lines| change_object(lines, |value| value.offset = 64);
    object_without_a_name: "object.name", |lines| change_object(lines, |value| value.name_len = 200);
    object_of_an_unknown_state: "object.state", |lines| change_object(lines, |value| value.state = 9);
    chunk_with_two_owners: "claim.two_owners", |lines| {
        let mut claim = Claim { incarnation: 2, ..Claim::zeroed() };
        claim.bits[0] = 1 << 4;
        lines.publish(0, claim)
    };
    claim_beyond_the_pool: "claim.range", |lines| {
        lines.publish(0, Claim { incarnation: 2, bits: [0x80; CHUNKS_PER_CLAIM / 8], ..Claim::zeroed() })
    };
    kept_blocks_without_a_claim: "chunk.orphan", |lines| {
        lines.publish(lines.layout().claim_lines(), Claim { incarnation: 2, ..Claim::zeroed() })
    };
    kept_blocks_of_a_fenced_host: "chunk.unadopted", |lines| {
        let mut row = FenceLine::default();
        row.fenced[1] = 2;
        lines.publish(0, row)
    };
    chunk_cut_into_no_class: "chunk.form", |lines| {
        lines.publish(2, ChunkHead { state: ChunkHead::BLOCKS, block_bytes: 65, ..lines.fetch::<ChunkHead>(2)? })
    };
    run_beyond_the_pool: "chunk.form", |lines| lines.publish(4, ChunkHead { run: u64::MAX, ..lines.fetch::<ChunkHead>(4)? });
    run_with_a_foreign_part: "chunk.broken_run", |lines| lines.publish(5, ChunkHead { run: 2, ..lines.fetch::<ChunkHead>(5)? });
    keep_bit_behind_the_last_block: "keep.range", |lines| {
        let mut keep = KeepMap { incarnation: 2, ..KeepMap::zeroed() };
        keep.bits[0] = 2;
        lines.publish(4 * at(lines, Geometry::keep_lines), keep)
    };
    free_of_something_that_is_no_block: "free_box.offset", |lines| {
        lines.publish(1, FreeBox { incarnation: 2, receiver: 2, sequence: 1, offsets: [65; BLOCKS_PER_FREE_BOX], ..FreeBox::default() })
    };
    unclaimed_seat_with_a_machine: "seat.unclaimed", |lines| lines.publish(1, Seat { machine: [4; 16], ..Seat::default() });
    epoch_beyond_the_limit: "seat.limit", |lines| lines.publish(0, Seat { epoch: MAX_NUMBER, machine: MACHINES[0], ..Seat::default() });
    last_epochs: "seat.used_up", |lines| {
        lines.publish(0, Seat { epoch: MAX_NUMBER - 1, machine: MACHINES[0], ..Seat::default() })
    };
    last_ballots: "claimant.used_up", |lines| lines.publish(0, Claimant { ballot: MAX_NUMBER - 3, ..Claimant::default() });
    last_incarnation_of_a_slot: "binding.used_up", |lines| {
        let binding = lines.fetch::<Binding>(1)?;
        lines.publish(1, Binding { incarnation: MAX_NUMBER - 1, ..binding })
    };
    last_incarnation_of_a_slot_by_its_fence: "binding.used_up", |lines| {
        let mut row = FenceLine::default();
        row.fenced[2] = MAX_NUMBER - 1;
        lines.publish(0, row)
    };
    places_used_up: "splitter.full", |lines| {
        (0..at(lines, Geometry::places)).try_for_each(|place| {
            lines.publish(2 * place + 1, Splitter { closed: 1, ..Splitter::default() })
        })
    };
    copy_that_was_never_adopted: "copy.unadopted", |lines| {
        lines.publish(at(lines, Geometry::bindings), Binding { incarnation: 1, machine: MACHINES[1], nonce: [1; 16], ..Binding::default() })
    };
    fence_of_no_slot: "fence.slot", |lines| {
        let mut row = FenceLine::default();
        row.fenced[11] = 1;
        lines.publish(0, row)
    };
    death_of_no_slot: "death.slot", |lines| {
        let mut row = DeathLine::default();
        row.dead[11] = 1;
        lines.publish(0, row)
    };
    death_declared_ahead: "death.ahead", |lines| {
        let (mut fence, mut row) = (FenceLine::default(), DeathLine::default());
        (fence.fenced[1], row.dead[1]) = (9, 9);
        lines.publish(0, fence)?;
        lines.publish(0, row)
    };
    binding_to_no_machine: "binding.unnamed", |lines| lines.publish(2, Binding { tag: 3, incarnation: 1, ..Binding::default() });
    binding_without_an_incarnation: "binding.empty", |lines| lines.publish(2, Binding { tag: 3, machine: [4; 16], ..Binding::default() });
    ballot_of_another_place: "claimant.ballot", |lines| {
        lines.publish(0, Claimant { ballot: 2, machine: MACHINES[1], ..Claimant::default() })
    };
    ballot_beyond_the_limit: "claimant.ballot", |lines| {
        lines.publish(15, Claimant { ballot: MAX_NUMBER, machine: MACHINES[1], ..Claimant::default() })
    };
    owner_under_no_ballot: "seat_claim.untagged", |lines| lines.publish(1, SeatClaim { tag: 0, ..owner_of_seat_1() });
    owner_without_a_session: "seat_claim.empty", |lines| lines.publish(1, SeatClaim { session: [0; 16], ..owner_of_seat_1() });
    owner_under_the_ballot_of_another_place: "seat_claim.tag", |lines| lines.publish(1, SeatClaim { tag: 2, ..owner_of_seat_1() });
    owner_above_the_ballot_of_its_place: "seat_claim.tag", |lines| lines.publish(1, owner_of_seat_1());
    seat_ahead_of_the_vote: "seat.session", |lines| {
        lines.publish(0, Claimant { ballot: 1, machine: MACHINES[1], ..Claimant::default() })?;
        lines.publish(1, owner_of_seat_1())?;
        lines.publish(1, Seat { machine: MACHINES[1], session: [9; 16], generation: 1, ..Seat::default() })
    };
    identity_without_an_incarnation: "identity.empty", |lines| lines.publish(2, Identity { machine: [4; 16], ..Identity::default() });
    identity_without_a_state: "identity.state", |lines| lines.publish(1, Identity { state: 0, ..lines.fetch::<Identity>(1)? });
    identity_that_drained_its_future: "identity.ahead", |lines| lines.publish(1, Identity { drained: 3, ..lines.fetch::<Identity>(1)? });
    join_that_did_not_finish: "identity.joining", |lines| lines.publish(1, Binding { incarnation: 3, ..lines.fetch::<Binding>(1)? });
    request_with_unknown_flags: "request.form", |lines| {
        let mut line = RequestLine { incarnation: 2, ..RequestLine::default() };
        line.requests[0].flags = 64;
        lines.publish(0, line)
    };
    request_for_no_lock: "request.lock", |lines| {
        let mut line = RequestLine { incarnation: 2, ..RequestLine::default() };
        line.requests[5].number = 1;
        lines.publish(at(lines, Geometry::request_lines) - 1, line)
    };
    grant_with_unknown_flags: "grant.form", |lines| change_grant(lines, |grant| grant.flags = 128);
    grant_to_no_slot: "grant.slot", |lines| change_grant(lines, |grant| grant.slot = 60);
    grant_without_a_number: "grant.empty", |lines| change_grant(lines, |grant| grant.number = 0);
    lock_of_a_fenced_holder: "grant.fenced_holder", |lines| {
        let mut row = FenceLine::default();
        row.fenced[1] = 2;
        lines.publish(0, row)
    };
    record_under_no_grant: "record.empty", |lines| lines.publish(0, Record { version: 1, ..Record::zeroed() });
    record_of_two_writers: "record.two_writers", |lines| {
        let record: Record = lines.fetch(object_cell(lines))?;
        lines.publish(object_cell(lines) - at(lines, Geometry::records), record)
    };
    record_of_a_fenced_writer: "record.doubtful", |lines| {
        let mut row = FenceLine::default();
        row.fenced[1] = 2;
        lines.publish(1, row)
    };
    lock_held_and_not_allocated: "lock_table.unallocated", |lines| {
        let (mut grants, mut requests) = (lines.fetch::<GrantLine>(2)?, lines.fetch::<RequestLine>(1)?);
        grants.grants[2] = Grant { number: 1, incarnation: 2, request: 1, slot: 0, flags: 0 };
        requests.requests[4] = Request { number: 1, flags: Request::WANT };
        lines.publish(2, grants)?;
        lines.publish(1, requests)
    };
    object_bound_twice: "object.twice", |lines| {
        let record: Record = lines.fetch(object_cell(lines))?;
        let first = at(lines, Geometry::records) + at(lines, Geometry::lock_table_records);
        lines.publish(first + (object_cell(lines) - first + 1) % 8, record)
    };
    intent_under_no_lock: "intent.lock", |lines| lines.publish(0, Intent { incarnation: 2, lock: 99, count: 1, ..Intent::default() });
    chunk_of_no_slot: "chunk.slot", |lines| lines.publish(2, ChunkHead { slot: 60, ..lines.fetch::<ChunkHead>(2)? });
    chunk_of_an_unbound_incarnation: "chunk.unbound", |lines| {
        lines.publish(2, ChunkHead { incarnation: 3, ..lines.fetch::<ChunkHead>(2)? })
    };
    run_of_more_bytes_than_chunks: "chunk.run_bytes", |lines| {
        lines.publish(4, ChunkHead { block_bytes: 1 << 30, ..lines.fetch::<ChunkHead>(4)? })
    };
    message_to_an_unbound_incarnation: "free_box.receiver", |lines| {
        lines.publish(1, FreeBox { incarnation: 2, receiver: 3, sequence: 1, ..FreeBox::default() })
    };
    cell_chunk_with_two_owners: "cell_claim.two_owners", |lines| change_claim(lines, 0, 1);
    claim_on_a_cell_chunk_that_there_is_not: "cell_claim.range", |lines| change_claim(lines, 0, 447);
    cell_chunk_of_a_fenced_host: "cell_claim.unadopted", |lines| fence(lines, &[1]);
    cell_chunk_of_two_fenced_hosts: "cell_claim.waits", |lines| {
        change_claim(lines, 0, 1)?;
        fence(lines, &[0, 1])
    };
    block_of_no_slot: "descriptor.slot", |lines| lines.publish(6, Descriptor { owner: 3, ..block(Descriptor::READY, OTHER) });
    block_of_an_unbound_incarnation: "descriptor.unbound", |lines| {
        lines.publish(6, Descriptor { incarnation: 3, ..block(Descriptor::READY, OTHER) })
    };
    block_longer_than_its_cell: "descriptor.length", |lines| {
        lines.publish(6, Descriptor { len_bytes: 4097, ..block(Descriptor::READY, OTHER) })
    };
    block_of_no_bytes: "descriptor.length", |lines| lines.publish(6, Descriptor { len_bytes: 0, ..block(Descriptor::READY, OTHER) });
    block_in_a_chunk_without_a_claim: "descriptor.unclaimed", |lines| lines.publish(13, block(Descriptor::READY, OTHER));
    block_of_a_host_that_does_not_claim_it: "descriptor.foreign", |lines| {
        lines.publish(6, Descriptor { owner: 0, ..block(Descriptor::READY, OTHER) })
    };
    late_block_of_a_fenced_host: "descriptor.late", |lines| {
        lines.publish(6, Descriptor { owner: 0, ..block(Descriptor::READY, OTHER) })?;
        fence(lines, &[0])
    };
    one_block_in_two_cells: "descriptor.twice", |lines| lines.publish(6, block(Descriptor::READY, KEY));
    block_that_no_lookup_comes_to: "descriptor.unreachable", |lines| lines.publish(home(lines), HintLine::default());
    hint_to_no_cell: "hint.range", |lines| change_hint(lines, 20);
    hint_to_another_block: "hint.stale", |lines| change_hint(lines, 5);
    pin_of_no_cell: "pin.range", |lines| lines.publish(1, PinLine { nibbles: [0, 0, 0, 0, 0, 0, 1], ..lines.fetch::<PinLine>(1)? });
    pins_of_an_unbound_incarnation: "line.unbound", |lines| lines.publish(1, PinLine { incarnation: 3, ..lines.fetch::<PinLine>(1)? });
    request_of_an_unbound_incarnation: "line.unbound", |lines| lines.publish(2, Ask { incarnation: 1, ..Ask::default() });
    message_acknowledged_before_it_was_sent: "free_box.ack", |lines| {
        lines.publish(1, FreeBox { incarnation: 2, receiver: 2, sequence: 1, ..FreeBox::default() })?;
        lines.publish(3, FreeAck { incarnation: 2, sender: 2, sequence: 2, ..FreeAck::default() })
    };
}

const OTHER: BlockKey = BlockKey([7; 16]);

fn change_claim(lines: &Lines, slot: u64, bit: usize) -> Result<()> {
    let mut claim: CellClaim = lines.fetch(slot)?;
    claim.set(bit, true);
    lines.publish(slot, claim)
}

fn change_hint(lines: &Lines, cell: u64) -> Result<()> {
    let mut line: HintLine = lines.fetch(home(lines))?;
    let Hint::Cell { fingerprint, .. } = line.get(0) else { panic!("no hint") };
    line.set(0, Hint::Cell { fingerprint, cell });
    lines.publish(home(lines), line)
}

fn fence(lines: &Lines, slots: &[usize]) -> Result<()> {
    let mut row = FenceLine::default();
    slots.iter().for_each(|&slot| row.fenced[slot] = 2);
    lines.publish(0, row)
}

fn object_cell(lines: &Lines) -> u64 {
    let geometry = lines.layout().geometry();
    geometry.records() + geometry.lock_table_records() + u64::from(crc32c::crc32c(b"root")) % u64::from(geometry.objects)
}

fn change_object(lines: &Lines, change: fn(&mut ObjectValue)) -> Result<()> {
    let record: Record = lines.fetch(object_cell(lines))?;
    let mut value: ObjectValue = bytemuck::cast(record.data);
    change(&mut value);
    lines.publish(object_cell(lines), Record { data: bytemuck::cast(value), ..record })
}

/// Moves the object `by` cells on, with nothing in between.
fn move_object(lines: &Lines, by: u64) -> Result<()> {
    let geometry = *lines.layout().geometry();
    let record: Record = lines.fetch(object_cell(lines))?;
    lines.publish(object_cell(lines), Record { data: [0; RECORD_BYTES], ..record })?;
    let first = geometry.records() + geometry.lock_table_records();
    lines.publish(first + (object_cell(lines) - first + by) % u64::from(geometry.objects), record)
}

fn change_grant(lines: &Lines, change: fn(&mut Grant)) -> Result<()> {
    let mut line: GrantLine = lines.fetch(0)?;
    change(&mut line.grants[1]);
    lines.publish(0, line)
}
