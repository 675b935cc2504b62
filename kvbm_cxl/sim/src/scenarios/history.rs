// SPDX-License-Identifier: Apache-2.0
//! What the hosts of a scenario did, and the invariants over it (protocols/LOCKS.md section 8).
//!
//! Recording has no scheduling point: it happens at one moment of the world, between two steps.

use crate::{Env, SimProcess};
use cxl_pool::media::{Binding, FenceLine, GrantLine, LOCKS_PER_GRANT, MediaLine, SLOTS_PER_FENCE};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What a scenario's threads share.
pub type Shared = Rc<RefCell<History>>;

/// A host inside a critical section.
#[derive(Clone, Copy, Debug)]
struct Holder {
    lock: u32,
    slot: u16,
    incarnation: u32,
    process: SimProcess,
    ticket: u64,
}

/// A live membership.
#[derive(Clone, Copy, Debug)]
struct Member {
    slot: u16,
    incarnation: u32,
    process: SimProcess,
    host: usize,
}

/// Everything recorded so far.
#[derive(Default)]
pub struct History {
    accepted: BTreeMap<(u32, u32), (u16, u32)>,
    holders: Vec<Holder>,
    members: Vec<Member>,
    incarnations: BTreeMap<(u16, u32), (usize, [u8; 16])>,
    starts: BTreeMap<(u16, u32), SimProcess>,
    /// Per lock of mode S: what its protected line may hold.
    values: BTreeMap<u32, Vec<u64>>,
    tickets: u64,
    /// Each machine runs one process, so that no incarnation is shared: one that outlives its process is used twice.
    pub one_process: bool,
    /// Critical sections entered.
    pub entered: u64,
    /// Acquisitions that timed out.
    pub timeouts: u64,
    /// Holders that were asked to repair.
    pub repairs: u64,
}

/// Whether any seat's row fences (slot, incarnation) in the memory itself.
fn is_fenced(env: &Env, slot: u16, incarnation: u32) -> bool {
    env.view(|view| {
        let geometry = *view.layout().geometry();
        (0..geometry.all_seats()).any(|seat| {
            let line = seat * geometry.fence_lines() + u64::from(slot) / SLOTS_PER_FENCE as u64;
            view.peek::<FenceLine>(line).fenced[usize::from(slot) % SLOTS_PER_FENCE] >= incarnation
        })
    })
}

/// V3, as the memory shows it: the copy of the grant line that counts, because its tag is the highest, knows the grant that was accepted.
fn known_to_the_newest(env: &Env, lock: u32, slot: u16, incarnation: u32, number: u32) -> Result<(), String> {
    let lines = env.lines();
    env.view(|view| {
        let geometry = *view.layout().geometry();
        let mut newest = GrantLine::default();
        for seat in 0..geometry.all_seats() {
            let index = seat * geometry.grant_lines() + u64::from(lock) / LOCKS_PER_GRANT as u64;
            let offset = view.layout().line_offset(GrantLine::REGION, index).map_err(|error| error.to_string())?;
            // A line that is being written says nothing.
            let Ok(copy) = lines.open::<GrantLine>(index, &view.line(offset)) else { return Ok(()) };
            if copy.tag > newest.tag {
                newest = copy;
            }
        }
        let last = newest.grants[lock as usize % LOCKS_PER_GRANT];
        let same = (u16::from(last.slot), last.incarnation) == (slot, incarnation);
        match last.number > number || (last.number == number && same) {
            true => Ok(()),
            false => Err(format!("V3: {slot}/{incarnation} holds lock {lock} by grant {number}, but epoch {} knows {last:?}", newest.tag)),
        }
    })
}

impl History {
    /// An empty history to share.
    pub fn shared() -> Shared {
        Rc::new(RefCell::new(History::default()))
    }

    /// A host is inside the critical section of `lock`; the result names this stay. Checks V1 to V3.
    pub fn enter(&mut self, env: &Env, lock: u32, slot: u16, incarnation: u32, grant: u32, strict: bool) -> u64 {
        self.entered += 1;
        if let Err(reason) = known_to_the_newest(env, lock, slot, incarnation, grant) {
            env.fail(reason);
        }
        let first = *self.accepted.entry((lock, grant)).or_insert((slot, incarnation));
        if first != (slot, incarnation) {
            env.fail(format!("V1: grant {grant} of lock {lock} accepted by {first:?} and by {:?}", (slot, incarnation)));
        }
        self.holders.retain(|holder| env.view(|view| view.is_alive(holder.process)));
        let mine_is_valid = !is_fenced(env, slot, incarnation);
        for other in self.holders.iter().filter(|other| other.lock == lock) {
            let same_host = other.slot == slot && other.incarnation == incarnation;
            if same_host {
                env.fail(format!("V2: two threads of host {slot} inside lock {lock}"));
            } else if strict {
                env.fail(format!("V2: slot {slot}/{incarnation} entered lock {lock} (grant {grant}) while {other:?} is inside"));
            } else if mine_is_valid && !is_fenced(env, other.slot, other.incarnation) {
                env.fail(format!("V2: two valid holders of lock {lock}: {other:?} and {slot}/{incarnation} (grant {grant})"));
            }
        }
        self.tickets += 1;
        self.holders.push(Holder { lock, slot, incarnation, process: env.process(), ticket: self.tickets });
        self.tickets
    }

    /// The stay of that ticket ended.
    pub fn exit(&mut self, ticket: u64) {
        self.holders.retain(|holder| holder.ticket != ticket);
    }

    /// A process joined. Checks V8.
    pub fn joined(&mut self, env: &Env, slot: u16, incarnation: u32, nonce: [u8; 16]) {
        let host = env.host().0;
        let first = *self.incarnations.entry((slot, incarnation)).or_insert((host, nonce));
        if first != (host, nonce) {
            env.fail(format!("V8: slot {slot} incarnation {incarnation} was bound to host {} and to host {host}", first.0));
        }
        let start = *self.starts.entry((slot, incarnation)).or_insert(env.process());
        if self.one_process && start != env.process() {
            env.fail(format!("V8: slot {slot} incarnation {incarnation} continues in {:?} after {start:?}", env.process()));
        }
        self.members.retain(|member| env.view(|view| view.is_alive(member.process)));
        for other in self.members.iter().filter(|other| other.slot == slot) {
            if other.host != host {
                env.fail(format!("V8: slot {slot} bound to host {host} ({incarnation}) while {other:?} lives"));
            } else if other.process != env.process() && other.incarnation < incarnation && !is_fenced(env, slot, other.incarnation) {
                env.fail(format!("V8: host {host} runs incarnation {incarnation} of slot {slot} while {other:?} lives"));
            }
        }
        // A re-join in place needs that no thread of the host is left in work of the old incarnation.
        self.holders.retain(|holder| env.view(|view| view.is_alive(holder.process)));
        if let Some(other) = self.holders.iter().find(|other| other.slot == slot && other.incarnation < incarnation) {
            env.fail(format!("V8: host {host} runs incarnation {incarnation} of slot {slot} while {other:?} is inside"));
        }
        self.members.retain(|member| member.process != env.process());
        self.members.push(Member { slot, incarnation, process: env.process(), host });
    }

    /// Checks V8 for this process between its calls: while it is a member, and not fenced, its slot is not bound again.
    pub fn stays_bound(&self, env: &Env) {
        let Some(member) = self.members.iter().find(|member| member.process == env.process()) else { return };
        let lines = env.lines();
        let bound = env.view(|view| {
            let geometry = *view.layout().geometry();
            let mut newest = Binding::default();
            for seat in 0..geometry.all_seats() {
                let index = seat * geometry.bindings() + u64::from(member.slot);
                // A line that is being written says nothing.
                let copy = lines.open::<Binding>(index, &view.line(view.layout().line_offset(Binding::REGION, index).ok()?)).ok()?;
                newest = if copy.tag > newest.tag { copy } else { newest };
            }
            Some(newest.incarnation)
        });
        if bound.is_some_and(|bound| bound > member.incarnation) && !is_fenced(env, member.slot, member.incarnation) {
            env.fail(format!("V8: bound again as incarnation {bound:?} while {member:?} lives"));
        }
    }

    /// A process left.
    pub fn left(&mut self, process: SimProcess) {
        self.members.retain(|member| member.process != process);
    }

    /// A holder of a mode S lock read `value` in the line that the lock protects.
    pub fn read(&mut self, env: &Env, lock: u32, value: u64) {
        let possible = self.values.entry(lock).or_insert_with(|| vec![0]);
        if !possible.contains(&value) {
            env.fail(format!("V2: a holder of lock {lock} read {value}, but the line must hold one of {possible:?}"));
        }
    }

    /// A holder of a mode S lock is about to write `value` over what it read.
    pub fn writing(&mut self, lock: u32, before: u64, value: u64) {
        self.values.insert(lock, vec![before, value]);
    }

    /// It has written `value`, and the write is in the memory.
    pub fn written(&mut self, lock: u32, value: u64) {
        self.values.insert(lock, vec![value]);
    }
}
