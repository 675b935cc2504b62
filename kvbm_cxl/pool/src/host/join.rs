// SPDX-License-Identifier: Apache-2.0
//! Joining and leaving (LOCKS.md section 4, J1 to J4).

use super::hooks::{self, Hooks, Work};
use super::local_mutex::Asker;
use super::segment::{Segment, state};
use super::{Host, HostConfig, Inner, names, witness};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::limits::{DEVICE_HEADER_BYTES, INTENTS, JOINBOXES, MAX_NUMBER};
use crate::line::{Line, Lines, if_whole};
use crate::lock::manager::Manager;
use crate::lock::seat;
use crate::media::{Binding, Identity, Intent, JoinBox};
use crate::platform::{MachineLock, MachineLockGuard, Platform};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Polls of a binding before the join box is written again: it may have been overwritten by another machine.
const POLLS_PER_BOX: u32 = 100;

/// Takes a machine-wide lock, waiting until `deadline_ns`.
fn machine_lock(platform: &dyn Platform, lock: MachineLock, config: &HostConfig, deadline_ns: u64) -> Result<MachineLockGuard> {
    let mut round = 0;
    loop {
        if let Some(guard) = platform.try_lock(lock, true)? {
            return Ok(guard);
        }
        if platform.now_ns() >= deadline_ns {
            return Err(Error::Timeout {
                what: format!("machine-wide lock {lock:?} (another process of this machine is joining)"),
                timeout_ms: config.join_timeout_ms(),
            });
        }
        platform.relax(round);
        round += 1;
    }
}

/// [`Host::join`].
pub(super) fn join(lines: Lines, platform: Arc<dyn Platform>, config: HostConfig, hooks: &'static [Hooks]) -> Result<Host> {
    config.check()?;
    let deadline_ns = platform.now_ns() + config.join_timeout_ms() * 1_000_000;
    let geometry = *lines.layout().geometry();
    let above_bytes: usize = hooks.iter().map(|layer| (layer.local_bytes)(lines.layout())).sum();
    let segment = Segment::over(platform.local_memory(Segment::len_bytes(&geometry) + above_bytes)?, &geometry)?;
    // J1. The exclusive hold on Members proves that no process of this machine's previous incarnation is left.
    let joining =
        if mutant!("join.no_local_lock") { None } else { Some(machine_lock(&*platform, MachineLock::Join, &config, deadline_ns)?) };
    let mut round = 0;
    let (members, mark, first) = loop {
        if joining.is_none() {
            break (None, None, true);
        }
        if let Some(exclusive) = platform.try_lock(MachineLock::Members, true)? {
            break (Some(exclusive), Some(mark_alone(&*platform, &config)?), true);
        }
        let running = segment.header().state.load(Ordering::SeqCst);
        if matches!(running, state::LIVE | state::FENCED)
            && let Some(shared) = platform.try_lock(MachineLock::Members, false)?
            && let Some((mark, has_siblings)) = mark_beside(&*platform)?
            // Without a sibling's mark the last one has just ended, and its end may be stated any time: this process starts over.
            && (has_siblings || !is_witness_shared(&segment, &*platform) || mutant!("witness.gap_between_marks"))
        {
            break (Some(shared), Some(mark), false);
        }
        if platform.now_ns() >= deadline_ns {
            let what = "the previous incarnation of this machine to end".into();
            return Err(Error::Timeout { what, timeout_ms: config.join_timeout_ms() });
        }
        platform.relax(round);
        round += 1;
    };
    point!("join.local");
    if first {
        start_over(&lines, &segment, hooks)?;
        segment.begin_session([platform.random(), platform.random()]);
    } else {
        segment.check_membership(&geometry)?;
    }
    let superblocks = superblock_lines(&lines)?;
    let index = segment.attach(platform.process())?;
    let tag = segment.tag_of(index);
    let inner = Arc::new(Inner {
        lines,
        platform,
        config,
        hooks,
        segment,
        index,
        tag,
        members: Mutex::new(members),
        mark: Mutex::new(mark),
        manager: Mutex::new(Manager::default()),
        closed: AtomicBool::new(false),
        has_door: AtomicBool::new(false),
        moved_files: AtomicU64::new(0),
        looked_at_files_ns: AtomicU64::new(0),
        resting: Mutex::default(),
        damage: Default::default(),
        failed_rounds: Default::default(),
        superblocks,
    });
    if first {
        inner.segment.header().witness.store(inner.platform.witness(), Ordering::SeqCst);
        if let Err(error) = inner.take_slot(inner.config.slot.map(u32::from), true, deadline_ns) {
            // A seat claimed on the way is of no use to a machine that is not in the pool. The join's error is the one that counts.
            let _ = inner.release_seat();
            return Err(error);
        }
        share_members(&inner, deadline_ns)?;
    } else if !is_witness_shared(&inner.segment, &*inner.platform) {
        inner.retire_witness()?;
    }
    drop(joining);
    Ok(Host { inner })
}

/// Whether this process asks the same kernel on the same file as the others of its host.
fn is_witness_shared(segment: &Segment, platform: &dyn Platform) -> bool {
    segment.header().witness.load(Ordering::SeqCst) == platform.witness()
}

/// Marks a further process of this machine, and tells whether a sibling is marked as well.
fn mark_beside(platform: &dyn Platform) -> Result<Option<(MachineLockGuard, bool)>> {
    point!("join.beside");
    platform.mark(false)
}

/// Marks the first process of this machine with the kernel. One that is marked already is of another state directory: J1 does not keep
/// the two apart, the kernel does.
fn mark_alone(platform: &dyn Platform, config: &HostConfig) -> Result<MachineLockGuard> {
    // The former incarnation's last process may still be ending; a twin stays.
    let deadline_ns = platform.now_ns() + config.suspect_ms * 1_000_000;
    let mut round = 0;
    loop {
        if let Some((mark, _)) = platform.mark(!mutant!("witness.twin_joins"))? {
            return Ok(mark);
        }
        if platform.now_ns() >= deadline_ns {
            return Err(Error::Twin { slot: None, machine: platform.machine() });
        }
        platform.relax(round);
        round += 1;
    }
}

/// The first line of every device's superblock as it is now.
pub(super) fn superblock_lines(lines: &Lines) -> Result<Vec<Line>> {
    let devices = u64::from(lines.layout().geometry().devices);
    (0..devices).map(|device| lines.fetch_raw(device * DEVICE_HEADER_BYTES)).collect()
}

/// Empties a segment whose processes are all gone.
fn start_over(lines: &Lines, segment: &Segment, hooks: &[Hooks]) -> Result<()> {
    let header = segment.header();
    let slot = header.slot.load(Ordering::Acquire) as u16;
    // The lines state that the incarnation before has ended: nothing of it may come out of this machine's caches later.
    let has_left = !matches!(header.state.load(Ordering::SeqCst), state::LIVE | state::FENCED);
    hooks::flush_residue(hooks, lines, &segment.behind(), slot, Work::Former { has_left })?;
    header.state.store(state::NONE, Ordering::SeqCst);
    // Another session may have had the seat since.
    header.rows_of_seat.store(0, Ordering::Release);
    segment.forget_processes();
    segment.reset_locks();
    Ok(())
}

/// Turns the exclusive hold on Members into a shared one. Not atomic, which the Join lock covers.
fn share_members(inner: &Inner, deadline_ns: u64) -> Result<()> {
    let Ok(mut members) = inner.members.try_lock() else { return Err(Error::Closed) };
    if members.take().is_none() {
        return Ok(());
    }
    let mut round = 0;
    loop {
        *members = inner.platform.try_lock(MachineLock::Members, false)?;
        if members.is_some() {
            return Ok(());
        }
        if inner.platform.now_ns() >= deadline_ns {
            return Err(Error::Timeout {
                what: "the shared hold on this machine's membership".into(),
                timeout_ms: inner.config.join_timeout_ms(),
            });
        }
        inner.platform.relax(round);
        round += 1;
    }
}

impl Inner {
    /// J2 to J4: has a slot bound to this machine under a fresh nonce and publishes the slot's lines.
    ///
    /// `fresh`: no process of an earlier incarnation of this machine is left, so its payload is at rest too.
    pub(super) fn take_slot(&self, wish: Option<u32>, fresh: bool, deadline_ns: u64) -> Result<()> {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&self.platform.random().to_le_bytes());
        nonce[8..].copy_from_slice(&self.platform.random().to_le_bytes());
        let mut problem = None;
        let mut round = 0;
        loop {
            // Where no manager serves, this host claims a seat and is its own: the role has to run while we wait for the binding.
            self.manage_leniently()?;
            if self.platform.now_ns() >= deadline_ns {
                let timeout_ms = self.config.join_timeout_ms();
                return Err(problem.unwrap_or_else(|| Error::Timeout { what: self.why_no_manager(), timeout_ms }));
            }
            self.platform.relax(round);
            round += 1;
            match self.ask_for_slot(wish, &nonce, deadline_ns) {
                Ok(Some((slot, binding))) => return self.open_slot(slot, &binding, fresh),
                Ok(None) => {}
                // Slots come free.
                Err(error @ (Error::SlotInUse { .. } | Error::Full { .. })) => problem = Some(error),
                Err(other) => problem = Some(self.wait_for_whole(other, self.config.damage_ms)?),
            }
        }
    }

    /// One attempt at J2 to J4: the slot that is ours, for every later manager too, or `None` when no manager answered in time.
    fn ask_for_slot(&self, wish: Option<u32>, nonce: &[u8; 16], deadline_ns: u64) -> Result<Option<(u32, Binding)>> {
        // J2
        let Some(newest) = seat::newest(self)? else { return Ok(None) };
        let bindings = self.bindings_of(newest.seat)?;
        let slot = match (0..bindings.len()).find(|&slot| self.is_mine(&bindings[slot], nonce)) {
            Some(slot) => slot,
            None => {
                let (slot, vouches) = self.choose_slot(&bindings, wish)?;
                let (machine, previous) = (self.platform.machine().0, bindings[slot].nonce);
                let vouch = if vouches { JoinBox::vouching(&previous) } else { 0 };
                let ask = JoinBox { slot: slot as u32, machine, nonce: *nonce, previous, vouch, ..JoinBox::default() };
                // J3
                self.lines.publish(self.platform.random() % JOINBOXES as u64, ask)?;
                point!("join.asked");
                slot
            }
        };
        let Some(binding) = self.await_binding(newest.seat, slot, nonce, deadline_ns)? else {
            // A manager binds no slot whose rows it cannot read.
            self.fenced_up_to(slot as u32)?;
            self.dead_up_to(slot as u32)?;
            // Nor one whose register a damaged copy keeps it from adopting.
            return self.blocked_binding(slot as u64)?.map_or(Ok(None), Err);
        };
        self.lines.settle::<Binding>(newest.seat * self.geometry().bindings() + slot as u64)?;
        Ok(self.accept_binding(&binding)?.then_some((slot as u32, binding)))
    }

    fn bindings_of(&self, seat: u64) -> Result<Vec<Binding>> {
        let geometry = self.geometry();
        let first = seat * geometry.bindings();
        let indexes: Vec<u64> = (first..first + u64::from(geometry.slots)).collect();
        let mut fetched: Vec<Result<Binding>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut fetched)?;
        fetched.into_iter().collect()
    }

    fn is_mine(&self, binding: &Binding, nonce: &[u8; 16]) -> bool {
        binding.tag != 0
            && binding.incarnation != 0
            && binding.machine == self.platform.machine().0
            && (binding.nonce == *nonce || mutant!("join.bind_to_machine_only"))
    }

    /// The slot to ask for, and whether this machine's kernel vouches that the host bound to it has ended.
    fn choose_slot(&self, bindings: &[Binding], wish: Option<u32>) -> Result<(usize, bool)> {
        let machine = self.platform.machine().0;
        let free = |slot: usize| -> Result<bool> {
            let binding = &bindings[slot];
            if binding.incarnation == 0 || binding.machine == machine {
                return Ok(true);
            }
            // What cannot be read proves nothing; another slot may be free.
            let identity: Option<Identity> = if_whole(self.lines.fetch(slot as u64))?;
            let is_its = |found: &Identity| found.incarnation == binding.incarnation || mutant!("join.any_departure_is_proof");
            let left = identity.is_some_and(|found| found.state == Identity::LEFT && is_its(&found));
            if mutant!("join.suspicion_is_proof") && self.fenced_up_to(slot as u32)? >= binding.incarnation {
                return Ok(true);
            }
            Ok(left || if_whole(self.dead_up_to(slot as u32))?.is_some_and(|dead| dead >= binding.incarnation))
        };
        if let Some(wish) = wish {
            let slot = wish as usize;
            if slot >= bindings.len() {
                return Err(Error::Invalid(format!("slot {wish} does not exist: the pool has {} slots", bindings.len())));
            }
            return match free(slot)? {
                true => Ok((slot, false)),
                false if self.vouches_for(slot, &bindings[slot])? => Ok((slot, true)),
                false => Err(Error::SlotInUse { slot: wish as u16 }),
            };
        }
        if let Some(slot) = bindings.iter().position(|binding| binding.machine == machine && binding.incarnation != 0) {
            return Ok((slot, false));
        }
        if let Some(slot) = bindings.iter().position(|binding| binding.incarnation == 0) {
            return Ok((slot, false));
        }
        for slot in 0..bindings.len() {
            if free(slot)? {
                return Ok((slot, false));
            }
        }
        for (slot, binding) in bindings.iter().enumerate() {
            if self.vouches_for(slot, binding)? {
                return Ok((slot, true));
            }
        }
        let advice = "`cxlctl hosts` tells who has them. Let one leave, or start it again under the identity it had; if machines are \
                      powered off or cut off for good, `cxlctl hosts declare-dead --all-fenced` lists them all and releases their slots";
        Err(Error::Full { what: "host slots", limit: bindings.len() as u64, advice })
    }

    /// Whether the host bound to a slot has ended by the word of this machine's kernel, and has nothing left in this machine's caches.
    fn vouches_for(&self, slot: usize, binding: &Binding) -> Result<bool> {
        let Some(identity) = if_whole(self.lines.fetch::<Identity>(slot as u64))? else { return Ok(false) };
        let is_its = identity.incarnation == binding.incarnation && identity.nonce == binding.nonce;
        if !is_its || !witness::has_ended_here(&self.lines, &*self.platform, slot as u64, &identity)? {
            return Ok(false);
        }
        self.flush_all_residue(slot as u16)?;
        // Its death is the death of its session, too, which may have a seat.
        self.segment.header().declared_dead[slot].fetch_max(identity.incarnation, Ordering::AcqRel);
        Ok(true)
    }

    fn await_binding(&self, seat: u64, slot: usize, nonce: &[u8; 16], deadline_ns: u64) -> Result<Option<Binding>> {
        for round in 0..POLLS_PER_BOX {
            let binding: Binding = self.lines.fetch(seat * self.geometry().bindings() + slot as u64)?;
            if self.is_mine(&binding, nonce) {
                return Ok(Some(binding));
            }
            // A round of the manager's work may take long on a pool in a bad state.
            if self.platform.now_ns() >= deadline_ns {
                return Ok(None);
            }
            self.manage_leniently()?;
            self.platform.relax(round);
        }
        Ok(None)
    }

    /// The manager's work, when a damaged line is no reason to give the join up.
    fn manage_leniently(&self) -> Result<()> {
        match self.manage() {
            Err(Error::BadLine { .. }) | Ok(_) => Ok(()),
            Err(other) => Err(other),
        }
    }

    /// J4, in the form of H3: no later manager may have claimed before we saw the binding.
    fn accept_binding(&self, binding: &Binding) -> Result<bool> {
        point!("join.seen");
        if mutant!("join.accept_without_check") {
            return Ok(true);
        }
        Ok(seat::newest(self)?.is_none_or(|newest| newest.epoch <= binding.tag))
    }

    fn open_slot(&self, slot: u32, binding: &Binding, fresh: bool) -> Result<()> {
        if binding.incarnation >= MAX_NUMBER {
            return Err(Error::Full { what: "incarnations of this slot", limit: MAX_NUMBER.into(), advice: "format the pool anew" });
        }
        point!("join.accepted");
        let header = self.segment.header();
        if fresh {
            self.flush_unremembered(slot)?;
        }
        header.slot.store(slot, Ordering::Release);
        header.incarnation.store(binding.incarnation, Ordering::Release);
        for (half, bytes) in header.nonce.iter().zip(binding.nonce.chunks_exact(8)) {
            half.store(bytes.try_into().map_or(0, u64::from_le_bytes), Ordering::Release);
        }
        if fresh {
            header.upkeep.drained.store(binding.incarnation - 1, Ordering::Release);
        }
        for intent in 0..INTENTS as u64 {
            let empty = Intent { incarnation: binding.incarnation, ..Intent::default() };
            self.lines.publish(u64::from(slot) * INTENTS as u64 + intent, empty)?;
        }
        for line in 0..self.geometry().request_lines() {
            self.publish_request_line(line)?;
        }
        for line in 0..self.geometry().summary_lines() {
            self.publish_summary(line)?;
        }
        let name = self.platform.name();
        if !name.is_empty() {
            // For people alone: a name that cannot be written keeps no host out.
            if let Err(error) = names::publish_name(&self.lines, slot, binding.incarnation, name.as_bytes()) {
                log::warn!("slot {slot}: the name of this machine was not written to the pool, so commands show its id: {error}");
            }
        }
        self.publish_identity(Identity::LIVE, binding.incarnation - 1)?;
        point!("join.live");
        header.state.store(state::LIVE, Ordering::SeqCst);
        if fresh {
            self.take_seat_of_slot()?;
        }
        self.take_boxes_back()
    }

    /// Empties the join boxes that this machine wrote for other slots or in former lives: a later manager that served one would bind a
    /// slot to a machine that does not want it, and no other machine could have that slot.
    fn take_boxes_back(&self) -> Result<()> {
        let indexes: Vec<u64> = (0..JOINBOXES as u64).collect();
        let mut boxes: Vec<Result<JoinBox>> = Vec::with_capacity(JOINBOXES);
        self.lines.fetch_many(&indexes, &mut boxes)?;
        for (index, found) in boxes.into_iter().enumerate() {
            // Another machine that writes here meanwhile asks again.
            if found.is_ok_and(|found| found.machine == self.platform.machine().0) {
                self.lines.publish(index as u64, JoinBox::default())?;
            }
        }
        Ok(())
    }

    /// This machine was in the slot before, and its segment does not know of it: a container that came back with another state directory.
    /// Then start_over knew nothing of the lines left in the caches.
    fn flush_unremembered(&self, slot: u32) -> Result<()> {
        let header = self.segment.header();
        let Some(before) = if_whole(self.lines.fetch::<Identity>(slot.into()))? else { return Ok(()) };
        let remembered = (header.slot.load(Ordering::Acquire), header.incarnation.load(Ordering::Acquire));
        let is_own = before.machine == self.platform.machine().0 && before.state == Identity::LIVE && !mutant!("witness.own_unflushed");
        if is_own && remembered != (slot, before.incarnation) { self.flush_all_residue(slot as u16) } else { Ok(()) }
    }

    pub(super) fn publish_identity(&self, state: u32, acknowledged: u32) -> Result<()> {
        let header = self.segment.header();
        let identity = Identity {
            incarnation: self.incarnation(),
            state,
            acknowledged,
            machine: self.platform.machine().0,
            nonce: self.nonce(),
            drained: header.upkeep.drained.load(Ordering::Acquire),
            session: crate::lock::claim::first_half(&self.segment.session()),
            report: header.upkeep.report.load(Ordering::Acquire),
            ..Identity::default()
        };
        self.lines.publish(self.slot().into(), identity)
    }

    pub(crate) fn nonce(&self) -> [u8; 16] {
        let mut nonce = [0; 16];
        for (half, bytes) in self.segment.header().nonce.iter().zip(nonce.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&half.load(Ordering::Acquire).to_le_bytes());
        }
        nonce
    }
}

/// [`Host::leave`].
pub(super) fn leave(inner: &Inner) -> Result<()> {
    // From here on this process begins nothing; what it has begun has to end before another process may count it out.
    if inner.closed.swap(true, Ordering::SeqCst) {
        return Err(Error::Closed);
    }
    let deadline_ns = inner.platform.now_ns() + inner.config.join_timeout_ms() * 1_000_000;
    // Before anything else, so that others need not wait for the role however long this process takes to leave, and while it counts as a
    // member: once the last one is gone the slot's seat may be another machine's. A closed process takes the role no more.
    let is_late = mutant!("left_before_resigned");
    let resigned = if is_late { Ok(()) } else { inner.resign() };
    let result = resigned.and_then(|()| detach(inner, deadline_ns));
    point!("leave.detached");
    let result = if is_late { result.and_then(|()| inner.resign()) } else { result };
    if result.is_err() {
        inner.closed.store(false, Ordering::SeqCst);
        return result;
    }
    if let Ok(mut mark) = inner.mark.try_lock() {
        drop(mark.take());
    }
    result
}

fn detach(inner: &Inner, deadline_ns: u64) -> Result<()> {
    let own = &inner.segment.header().processes[inner.index].operations;
    wait_until(inner, deadline_ns, || own.load(Ordering::SeqCst) == 0)?;
    let _joining = machine_lock(&*inner.platform, MachineLock::Join, &inner.config, deadline_ns)?;
    // A service round of this host, of whichever process, must not publish a slot line after the slot is given up.
    let is_alive = |tag| inner.is_tag_alive(tag);
    let service = &inner.segment.header().upkeep.service;
    let asker = Asker { tag: inner.tag, platform: &*inner.platform, is_alive: &is_alive };
    if service.lock(&asker, deadline_ns).is_none() {
        return Err(Error::Timeout { what: "a service round of this host to end".into(), timeout_ms: inner.config.join_timeout_ms() });
    }
    let result = give_slot_up(inner);
    service.unlock(&*inner.platform);
    result
}

/// Drops this process's hold on the membership; the last one marks the slot LEFT.
fn give_slot_up(inner: &Inner) -> Result<()> {
    let Ok(mut members) = inner.members.try_lock() else { return Err(Error::Closed) };
    drop(members.take());
    let Some(last) = inner.platform.try_lock(MachineLock::Members, true)? else { return Ok(()) };
    let header = inner.segment.header();
    let before = header.state.swap(state::LEFT, Ordering::SeqCst);
    let result = match before {
        state::LIVE => inner.give_all_back(),
        state::FENCED => Ok(()),
        // Not ours to say: another machine writes these lines, or the slot was never opened.
        _ => return Ok(()),
    };
    let result = result.and_then(|()| {
        // A fenced host leaves as well: nothing of it runs any more, and saying so is the proof that others may be waiting for.
        let incarnation = inner.incarnation();
        inner.flush_residue(inner.slot() as u16, Work::Leaving)?;
        header.upkeep.drained.store(incarnation, Ordering::Release);
        point!("leave.released");
        inner.publish_identity(Identity::LEFT, incarnation)
    });
    if result.is_ok() {
        return inner.release_seat();
    }
    // Nothing was published, so the membership continues and may be left another time.
    header.state.store(before, Ordering::SeqCst);
    drop(last);
    *members = inner.platform.try_lock(MachineLock::Members, false)?;
    result
}

fn wait_until(inner: &Inner, deadline_ns: u64, is_done: impl Fn() -> bool) -> Result<()> {
    let mut round = 0;
    while !is_done() {
        if inner.platform.now_ns() >= deadline_ns {
            let what = "this process's running work to end before it leaves".into();
            return Err(Error::Timeout { what, timeout_ms: inner.config.join_timeout_ms() });
        }
        inner.platform.relax(round);
        round += 1;
    }
    Ok(())
}
