// SPDX-License-Identifier: Apache-2.0
//! Named objects: a small table from names to pool offsets, through which hosts find the roots of what they share (TraCT 3.5, 4.1).
//!
//! A hash table with linear probing over [`OBJECT_PROBES`] cells; each cell is a [record] with an [`ObjectValue`], written
//! under [`LOCK_OBJECTS`](crate::lock::LOCK_OBJECTS). A name never moves while it is bound, so lookups need no lock. A destroyed name
//! leaves a tombstone, which becomes empty again once the cell after it is.

use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::limits::{INTENT_LINES, MAX_OBJECT_NAME_BYTES, OBJECT_PROBES};
use crate::media::{Layout, ObjectValue, RECORD_BYTES, Region};
use crate::record::{self, Best, Locked, Reading, Structure};

/// What a name is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The name.
    pub name: Vec<u8>,
    /// Pool offset.
    pub offset: u64,
    /// Length in bytes that the publisher gave; 0 = not given.
    pub len_bytes: u64,
    /// A [listener](crate::ring::Listener) bound it, to its own block: once that one is gone, so may the name be.
    pub is_listener: bool,
}

/// The named objects of a pool, as one host uses them.
#[derive(Clone)]
pub struct Objects {
    host: Host,
}

fn probes(name: &[u8], layout: &Layout) -> impl Iterator<Item = u64> {
    let records = Structure::Objects.records(layout.geometry());
    let cells = records.end - records.start;
    let home = u64::from(crc32c::crc32c(name)) % cells;
    (0..cells.min(OBJECT_PROBES as u64)).map(move |step| records.start + (home + step) % cells)
}

/// Reads a cell; what a record holds is no more to be trusted than any other byte of the pool.
fn open(best: &Best, layout: &Layout) -> Result<ObjectValue> {
    let value: ObjectValue = bytemuck::cast(best.copy.data);
    let bad = |reason| Err(Error::BadLine { region: Region::Record.name(), index: best.number, reason });
    match value.state {
        ObjectValue::EMPTY | ObjectValue::TOMB => Ok(value),
        ObjectValue::LIVE if value.name_len == 0 || usize::from(value.name_len) > MAX_OBJECT_NAME_BYTES => bad("object name length"),
        ObjectValue::LIVE if !in_data(layout, value.offset, value.len_bytes.into()) => bad("object outside the chunks"),
        ObjectValue::LIVE => Ok(value),
        _ => bad("unknown object state"),
    }
}

fn in_data(layout: &Layout, offset: u64, len_bytes: u64) -> bool {
    let last = offset.checked_add(len_bytes.saturating_sub(1));
    layout.chunk_of(offset).is_some() && last.is_some_and(|last| layout.chunk_of(last).is_some())
}

fn name_of(value: &ObjectValue) -> &[u8] {
    &value.name[..usize::from(value.name_len)]
}

fn is_named(value: &ObjectValue, name: &[u8]) -> bool {
    value.state == ObjectValue::LIVE && name_of(value) == name
}

fn object(value: &ObjectValue) -> Object {
    let is_listener = value.kind == ObjectValue::LISTENER;
    Object { name: name_of(value).to_vec(), offset: value.offset, len_bytes: value.len_bytes.into(), is_listener }
}

fn compose(name: &[u8], offset: u64, len_bytes: u32, is_listener: bool) -> [u8; RECORD_BYTES] {
    let mut value = ObjectValue {
        offset,
        len_bytes,
        state: ObjectValue::LIVE,
        name_len: name.len() as u8,
        kind: if is_listener { ObjectValue::LISTENER } else { 0 },
        name: [0; MAX_OBJECT_NAME_BYTES],
    };
    value.name[..name.len()].copy_from_slice(name);
    bytemuck::cast(value)
}

fn unbound(state: u8) -> [u8; RECORD_BYTES] {
    bytemuck::cast(ObjectValue { state, ..ObjectValue::default() })
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > MAX_OBJECT_NAME_BYTES {
        return Err(Error::Invalid(format!("an object name has 1 to {MAX_OBJECT_NAME_BYTES} bytes, this one {}", name.len())));
    }
    Ok(())
}

fn quote(name: &[u8]) -> String {
    format!("object {:?}", String::from_utf8_lossy(name))
}

struct FoundName {
    bound: Option<Best>,
    room: Option<Best>,
}

impl Objects {
    /// The objects of the pool that `host` has joined.
    pub fn new(host: &Host) -> Self {
        Objects { host: host.clone() }
    }

    fn layout(&self) -> &Layout {
        self.host.lines().layout()
    }

    /// Binds a name.
    ///
    /// # Errors
    /// [`Error::Exists`]; [`Error::Full`] when all cells that the name may use are taken; [`Error::Fenced`] (outcome unknown),
    /// [`Error::Timeout`] after `timeout_ms`.
    pub fn put(&self, name: &[u8], offset: u64, len_bytes: u64, timeout_ms: u64) -> Result<()> {
        self.bind(&Object { name: name.to_vec(), offset, len_bytes, is_listener: false }, timeout_ms, |_| Ok(false))
    }

    /// Binds a name whether it is bound already or not; readers see the old or the new binding. Errors as [`Objects::put`].
    pub fn replace(&self, name: &[u8], offset: u64, len_bytes: u64, timeout_ms: u64) -> Result<()> {
        self.bind(&Object { name: name.to_vec(), offset, len_bytes, is_listener: false }, timeout_ms, |_| Ok(true))
    }

    /// Binds a name; one that is bound, to what `may_replace` says while no process can bind it again. Errors as [`Objects::put`].
    pub(crate) fn bind(&self, new: &Object, timeout_ms: u64, may_replace: impl FnOnce(&Object) -> Result<bool>) -> Result<()> {
        let Object { ref name, offset, len_bytes, is_listener } = *new;
        check_name(name)?;
        let Ok(stored_len) = u32::try_from(len_bytes) else {
            return Err(Error::Invalid(format!("an object records at most 4 GiB, not {len_bytes} bytes: store its length inside it")));
        };
        if !in_data(self.layout(), offset, len_bytes) {
            let limit_bytes = self.host.lines().memory().len_bytes();
            return Err(Error::OutOfRange { what: "an object (it has to lie in the chunks)", offset, len_bytes, limit_bytes });
        }
        let mut locked = Locked::acquire(&self.host, Structure::Objects, timeout_ms)?;
        let found = self.find(&locked, name)?;
        let place = match (found.bound, found.room) {
            (Some(best), _) if !may_replace(&object(&open(&best, self.layout())?))? => {
                locked.confirm()?;
                return Err(Error::Exists(quote(name)));
            }
            (Some(best), _) | (None, Some(best)) => best,
            (None, None) => {
                locked.confirm()?;
                let advice = "destroy objects, or format the pool with a larger object table";
                return Err(Error::Full {
                    what: "the part of the object table that this name may use",
                    limit: OBJECT_PROBES as u64,
                    advice,
                });
            }
        };
        point!("objects.found");
        locked.commit(&[(place, compose(name, offset, stored_len, is_listener))])
    }

    fn find(&self, locked: &Locked<'_>, name: &[u8]) -> Result<FoundName> {
        let mut room = None;
        for number in probes(name, self.layout()) {
            let best = locked.read(number)?;
            let value = open(&best, self.layout())?;
            if is_named(&value, name) {
                return Ok(FoundName { bound: Some(best), room });
            }
            if value.state != ObjectValue::LIVE {
                room = room.or(Some(best));
            }
            if value.state == ObjectValue::EMPTY || (mutant!("objects.put_no_probe") && room.is_some()) {
                break;
            }
        }
        Ok(FoundName { bound: None, room })
    }

    /// What a name is bound to. Takes no lock unless a cell is in doubt because its writer was fenced; then it takes it for at most
    /// `timeout_ms` and ends the doubt for all hosts.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Timeout`] or [`Error::Fenced`] when a doubt could not be settled; [`Error::BadLine`].
    pub fn get(&self, name: &[u8], timeout_ms: u64) -> Result<Object> {
        check_name(name)?;
        for number in probes(name, self.layout()) {
            let value = match record::read(&self.host, number)? {
                Reading::Final(best) => open(&best, self.layout())?,
                Reading::Doubtful => return self.get_settled(name, timeout_ms),
            };
            if is_named(&value, name) {
                return Ok(object(&value));
            }
            if value.state == ObjectValue::EMPTY {
                break;
            }
            point!("objects.passed");
        }
        Err(Error::NotFound(quote(name)))
    }

    fn get_settled(&self, name: &[u8], timeout_ms: u64) -> Result<Object> {
        let mut locked = Locked::acquire(&self.host, Structure::Objects, timeout_ms)?;
        let mut found = None;
        for number in probes(name, self.layout()) {
            let value = open(&locked.settle(number)?, self.layout())?;
            if is_named(&value, name) {
                found = Some(object(&value));
            }
            if found.is_some() || value.state == ObjectValue::EMPTY {
                break;
            }
        }
        point!("objects.settled");
        locked.confirm()?;
        found.ok_or_else(|| Error::NotFound(quote(name)))
    }

    /// Unbinds a name. What it was bound to is left alone.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Fenced`] (outcome unknown), [`Error::Timeout`] after `timeout_ms`.
    pub fn destroy(&self, name: &[u8], timeout_ms: u64) -> Result<()> {
        self.destroy_if(name, timeout_ms, |_| Ok(true))
    }

    /// Unbinds a name if it is bound to this offset: not where it was bound again meanwhile, which is [`Error::NotFound`] as well.
    /// Errors as [`Objects::destroy`].
    pub fn destroy_at(&self, name: &[u8], offset: u64, timeout_ms: u64) -> Result<()> {
        self.destroy_if(name, timeout_ms, |bound| Ok(bound.offset == offset))
    }

    /// Unbinds a name if it is bound to what `is_meant`, asked while no process can bind it again, says; if not, [`Error::NotFound`]
    /// as well. Errors as [`Objects::destroy`].
    pub(crate) fn destroy_if(&self, name: &[u8], timeout_ms: u64, is_meant: impl FnOnce(&Object) -> Result<bool>) -> Result<()> {
        check_name(name)?;
        let mut locked = Locked::acquire(&self.host, Structure::Objects, timeout_ms)?;
        let bound = match self.find(&locked, name)?.bound {
            Some(bound) if is_meant(&object(&open(&bound, self.layout())?))? => bound,
            _ => {
                locked.confirm()?;
                return Err(Error::NotFound(quote(name)));
            }
        };
        let records = Structure::Objects.records(self.layout().geometry());
        let cells = records.end - records.start;
        let beside = |number: u64, steps: u64| records.start + (number - records.start + steps) % cells;
        let behind = open(&locked.read(beside(bound.number, 1))?, self.layout())?;
        point!("objects.found_behind");
        if (behind.state != ObjectValue::EMPTY && !mutant!("objects.destroy_empty")) || cells == 1 {
            return locked.commit(&[(bound, unbound(ObjectValue::TOMB))]);
        }
        // No probe continues after this cell, so it may end here, and with it the tombstones right before it. The order matters: a
        // crash between two cells must not leave a live one after an empty one.
        let mut changes = vec![(bound, unbound(ObjectValue::EMPTY))];
        for back in 1..(INTENT_LINES as u64).min(cells - 1) {
            let before = locked.read(beside(bound.number, cells - back))?;
            if open(&before, self.layout())?.state != ObjectValue::TOMB {
                break;
            }
            changes.push((before, unbound(ObjectValue::EMPTY)));
        }
        if mutant!("objects.clear_backwards") {
            changes.reverse();
        }
        point!("objects.clearing");
        locked.commit(&changes)
    }

    /// Every bound name, in no order. Names bound or unbound meanwhile may or may not be in it, and one that was unbound and bound again
    /// may be in it twice; doubt is settled as in [`Objects::get`].
    pub fn list(&self, timeout_ms: u64) -> Result<Vec<Object>> {
        let mut objects = Vec::new();
        for number in Structure::Objects.records(self.layout().geometry()) {
            let best = match record::read(&self.host, number)? {
                Reading::Final(best) => best,
                Reading::Doubtful => {
                    let mut locked = Locked::acquire(&self.host, Structure::Objects, timeout_ms)?;
                    let best = locked.settle(number)?;
                    locked.confirm()?;
                    best
                }
            };
            let value = open(&best, self.layout())?;
            if value.state == ObjectValue::LIVE {
                objects.push(object(&value));
            }
            point!("objects.listed");
        }
        Ok(objects)
    }
}

#[cfg(test)]
mod tests;
