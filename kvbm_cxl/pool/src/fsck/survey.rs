// SPDX-License-Identifier: Apache-2.0
//! The state of hosts, seats, locks and objects as the metadata tells it, for operators. Nothing is judged here: that is [`super::check`].

use super::view::View;
use crate::error::Result;
use crate::host::{machine_name, name_and_id};
use crate::line::Lines;
use crate::lock::LockId;
use crate::media::*;
use crate::platform::MachineId;

crate::named::named_enum! {
    /// How a slot stands.
    SlotState {
        /// It is free.
        Free = "free",
        /// A machine was given it and has not finished joining.
        Joining = "joining",
        /// A host has it.
        Live = "live",
        /// Its host left.
        Left = "left",
        /// Its lines do not tell.
        Unreadable = "unreadable",
    }
}

/// A host slot.
#[derive(Clone, Debug)]
pub struct SlotInfo {
    /// Its number.
    pub slot: u16,
    /// How it stands.
    pub state: SlotState,
    /// The machine bound to it.
    pub machine: MachineId,
    /// What people call that machine, in printable ASCII, as its host says; a hint.
    pub name: Option<String>,
    /// The incarnation bound to it; 0 = never bound.
    pub incarnation: u32,
    /// A line that does not verify may bind a later one.
    pub is_binding_hidden: bool,
    /// Heartbeats counted.
    pub heartbeat: u64,
    /// Fenced up to this incarnation.
    pub fenced: u32,
    /// Death proven by an operator up to this incarnation.
    pub dead: u32,
    /// The host itself says that nothing up to this incarnation writes metadata any more.
    pub acknowledged: u32,
    /// The host itself says that nothing up to this incarnation writes payload any more.
    pub drained: u32,
    /// Locks that it holds.
    pub held: Vec<LockId>,
    /// Locks that it waits for.
    pub wanted: Vec<LockId>,
}

/// A manager seat.
#[derive(Clone, Debug)]
pub struct SeatInfo {
    /// Its number.
    pub seat: u16,
    /// The slot that it belongs to; `None` of one that is claimed or reserved.
    pub slot: Option<u16>,
    /// The machine it belongs to.
    pub machine: Option<MachineId>,
    /// Its machine has a slot, and nothing tells that the machine is gone.
    pub is_living: bool,
    /// The superblock says so; otherwise the machine claimed it.
    pub is_fixed: bool,
    /// The session that claimed it; `None` for a fixed seat and one that was never claimed.
    pub session: Option<MachineId>,
    /// Sessions that the seat was given to; the incarnation of its slot, if it belongs to one.
    pub generation: u32,
    /// Its session is proven to be over, so any machine may claim it.
    pub is_over: bool,
    /// Epoch that it claimed last; `None` when its line does not verify.
    pub epoch: Option<u32>,
    /// Beats counted; `None` when it resigned or never served.
    pub beat: Option<u64>,
    /// It claimed last, and so has the manager role or had it last.
    pub is_newest: bool,
}

/// A lock that was ever granted or allocated.
#[derive(Clone, Debug)]
pub struct LockInfo {
    /// Its number.
    pub lock: LockId,
    /// Whether the lock table says that it is allocated; `None` when that is unknown.
    pub allocated: Option<bool>,
    /// Number of its last grant.
    pub grant: u32,
    /// Slot and incarnation that this grant was given to.
    pub holder: Option<(u16, u32)>,
    /// The holder has not given it back.
    pub is_held: bool,
    /// The structure has to be repaired by its holder.
    pub needs_repair: bool,
    /// Slots that wait for it.
    pub waiting: Vec<u16>,
}

/// A bound name.
#[derive(Clone, Debug)]
pub struct ObjectInfo {
    /// The name.
    pub name: Vec<u8>,
    /// Cell of the object table.
    pub cell: u64,
    /// Pool offset.
    pub offset: u64,
    /// Length in bytes; 0 = not given.
    pub len_bytes: u64,
    /// A listener bound it, to its own block.
    pub is_listener: bool,
    /// Slot of the host that wrote it.
    pub writer: u16,
    /// Its writer is fenced: it is not final before it is settled under the lock.
    pub is_doubtful: bool,
}

/// Everything about a pool that an operator asks for.
#[derive(Clone, Debug)]
pub struct Survey {
    /// Every slot.
    pub slots: Vec<SlotInfo>,
    /// Every seat.
    pub seats: Vec<SeatInfo>,
    /// Locks in use.
    pub locks: Vec<LockInfo>,
    /// Bound names.
    pub objects: Vec<ObjectInfo>,
}

impl Survey {
    /// What people call a machine, where it has a slot and its name can be read.
    pub fn name_of(&self, machine: MachineId) -> Option<&str> {
        self.slots.iter().find(|slot| slot.machine == machine && slot.name.is_some())?.name.as_deref()
    }

    /// A machine as a sentence names it: with its name, if that is known.
    pub fn machine_text(&self, machine: MachineId) -> String {
        name_and_id(machine, self.name_of(machine))
    }
}

/// Reads the state of everything; lines that do not verify count as not there.
pub fn survey(lines: &Lines, seats: &[MachineId]) -> Result<Survey> {
    let view = View::load(lines, seats)?;
    let slots = slots(&view);
    Ok(Survey { seats: self::seats(&view, &slots), slots, locks: locks(&view), objects: objects(&view) })
}

fn is_wanted(view: &View<'_>, slot: u64, lock: LockId) -> bool {
    let asks = view.request(slot, lock);
    asks.is_some_and(|(incarnation, request)| incarnation == view.bound(slot) && request.flags & Request::WANT != 0)
        && view.bound(slot) != 0
        && !view.is_held(slot, lock)
}

fn slots(view: &View<'_>) -> Vec<SlotInfo> {
    (0..u64::from(view.geometry.slots))
        .map(|slot| {
            let register = &view.decided_bindings[slot as usize];
            let identity = view.identities.get(slot).copied();
            let bound = register.best;
            let state = match identity {
                _ if register.hidden => SlotState::Unreadable,
                _ if bound.incarnation == 0 => SlotState::Free,
                None => SlotState::Unreadable,
                Some(identity) if identity.incarnation < bound.incarnation => SlotState::Joining,
                Some(identity) if identity.state == Identity::LEFT => SlotState::Left,
                Some(_) => SlotState::Live,
            };
            let identity = identity.unwrap_or_default();
            SlotInfo {
                slot: slot as u16,
                state,
                machine: MachineId(bound.machine),
                name: machine_name(view.lines, slot as u32, bound.incarnation),
                incarnation: bound.incarnation,
                is_binding_hidden: register.hidden,
                heartbeat: view.summaries.get(slot * view.geometry.summary_lines()).map_or(0, |summary| summary.heartbeat),
                fenced: view.fenced[slot as usize],
                dead: view.dead[slot as usize],
                acknowledged: identity.acknowledged,
                drained: identity.drained,
                held: (0..view.geometry.locks).filter(|&lock| view.is_held(slot, lock)).collect(),
                wanted: (0..view.geometry.locks).filter(|&lock| is_wanted(view, slot, lock)).collect(),
            }
        })
        .collect()
}

fn seats(view: &View<'_>, slots: &[SlotInfo]) -> Vec<SeatInfo> {
    let newest = view.seats.iter().map(|(_, seat)| seat.epoch).max().filter(|&epoch| epoch > 0);
    let lives = |slot: &&SlotInfo| slot.state == SlotState::Live && slot.fenced < slot.incarnation;
    (0..view.geometry.all_seats())
        .map(|seat| {
            let line = view.seats.get(seat);
            let claim = view.decided_seats[seat as usize].best;
            let (slot, machine) = (view.geometry.slot_of(seat).map(|slot| slot as u16), view.seat_machine(seat));
            let living = match slot {
                Some(slot) => slots.iter().filter(lives).find(|info| info.slot == slot),
                None => slots.iter().filter(lives).find(|info| Some(info.machine) == machine),
            };
            // The line of a slot's seat names a session from when the machine has joined.
            let session = if slot.is_some() { line.map_or([0; 16], |line| line.session) } else { claim.session };
            SeatInfo {
                session: (claim.generation != 0).then_some(MachineId(session)),
                generation: claim.generation,
                is_over: match slot {
                    Some(slot) => {
                        slots.iter().any(|info| info.slot == slot && (info.state == SlotState::Left || info.dead >= info.incarnation))
                    }
                    None => crate::lock::claim::standing(view.lines, seat).is_ok_and(|(_, is_over)| is_over),
                },
                is_living: living.is_some(),
                seat: seat as u16,
                slot,
                machine,
                is_fixed: view.fixed_seats.get(seat as usize).is_some_and(|machine| !machine.is_none()),
                epoch: line.map(|line| line.epoch),
                beat: line.filter(|line| line.epoch > 0 && line.beat != u64::MAX).map(|line| line.beat),
                is_newest: newest.is_some() && line.map(|line| line.epoch) == newest,
            }
        })
        .collect()
}

fn locks(view: &View<'_>) -> Vec<LockInfo> {
    let table: Vec<Option<(u64, Record)>> = (0..view.geometry.lock_table_records()).map(|number| view.best_record(number)).collect();
    let info = |lock: LockId| {
        let bit = lock as usize % LOCKS_PER_RECORD;
        let grant = view.grant(lock);
        let slot = u64::from(grant.slot);
        LockInfo {
            lock,
            allocated: table[lock as usize / LOCKS_PER_RECORD].as_ref().map(|(_, record)| record.data[bit / 8] >> (bit % 8) & 1 == 1),
            grant: grant.number,
            holder: (grant.number != 0).then_some((u16::from(grant.slot), grant.incarnation)),
            is_held: view.is_held(slot, lock),
            needs_repair: grant.flags & Grant::REPAIR != 0,
            waiting: (0..view.geometry.slots as u16).filter(|&slot| is_wanted(view, slot.into(), lock)).collect(),
        }
    };
    (0..view.geometry.locks).map(info).filter(|lock| lock.grant != 0 || lock.allocated == Some(true) || !lock.waiting.is_empty()).collect()
}

fn objects(view: &View<'_>) -> Vec<ObjectInfo> {
    let first = view.geometry.lock_table_records();
    (first..view.geometry.records())
        .filter_map(|number| {
            let (slot, record) = view.best_record(number)?;
            let value: ObjectValue = bytemuck::cast(record.data);
            let name = value.name.get(..usize::from(value.name_len))?;
            (value.state == ObjectValue::LIVE).then(|| ObjectInfo {
                name: name.to_vec(),
                cell: number - first,
                offset: value.offset,
                len_bytes: value.len_bytes.into(),
                is_listener: value.kind == ObjectValue::LISTENER,
                writer: slot as u16,
                is_doubtful: view.is_fenced(slot, record.incarnation),
            })
        })
        .collect()
}
