// SPDX-License-Identifier: Apache-2.0
//! Any metadata line in words: its name, its owner, its fields, whether it verifies.

use crate::error::Error;
use crate::limits::{INTENTS, MAX_OBJECT_NAME_BYTES};
use crate::line::{Line, Lines, with_line_of};
use crate::lock::FIRST_STRIPE_LOCK;
use crate::media::*;
use crate::metrics::stats::Stat;
use crate::platform::MachineId;

/// A field's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number.
    Number(u64),
    /// A number that is best read in hexadecimal: an offset, a CRC.
    Hex(u64),
    /// A word: a state, a name, an id.
    Text(String),
    /// Several values of one kind.
    List(Vec<Value>),
    /// Named values.
    Group(Vec<(&'static str, Value)>),
}

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its name in the protocols, such as `GR[1][3]`.
    pub name: String,
    /// Who may write it.
    pub owner: String,
    /// Why it does not verify; `None` when it does. The fields of a line that does not verify mean nothing.
    pub damage: Option<&'static str>,
    /// True when nothing was ever written to it since the format.
    pub is_empty: bool,
    /// Its fields.
    pub fields: Vec<(&'static str, Value)>,
}

/// The name of a line in the protocols.
pub fn line_name(layout: &Layout, region: Region, index: u64) -> String {
    let geometry = layout.geometry();
    let pair = |name: &str, per: u64| format!("{name}[{}][{}]", index / per.max(1), index % per.max(1));
    match region {
        Region::Seat => format!("SEAT[{index}]"),
        Region::Grant => pair("GR", geometry.grant_lines()),
        Region::Binding => pair("BIND", geometry.bindings()),
        Region::Fence => pair("FEN", geometry.fence_lines()),
        Region::Death => pair("DEAD", geometry.fence_lines()),
        Region::JoinBox => format!("JOINBOX[{index}]"),
        Region::Identity => format!("ID[{index}]"),
        Region::Summary => pair("SUM", geometry.summary_lines()),
        Region::Request => pair("REQ", geometry.request_lines()),
        Region::Intent => pair("INTENT", INTENTS as u64),
        Region::Record => pair("REC", geometry.records()),
        Region::Claim => pair("CLAIM", layout.claim_lines()),
        Region::FreeBox => pair("FREEBOX", geometry.slots.into()),
        Region::FreeAck => pair("FREEACK", geometry.slots.into()),
        Region::ChunkHead => format!("CHUNK[{index}]"),
        Region::KeepMap => pair("KEEP", geometry.keep_lines()),
        Region::Stats => pair("STATS", geometry.stats_lines.into()),
        Region::Descriptor => format!("DESC[{index}]"),
        Region::Hint => pair("HINT", geometry.hint_lines_per_stripe()),
        Region::Pin => pair("PIN", geometry.pin_lines()),
        Region::CellClaim => pair("CCLAIM", geometry.cell_claim_lines()),
        Region::Ask => format!("ASK[{index}]"),
        Region::Splitter => format!("SPLITTER[{}].{}", index / 2, if index.is_multiple_of(2) { "name" } else { "door" }),
        Region::Claimant => format!("CLAIMANT[{index}]"),
        Region::SeatClaim => pair("SEATCLAIM", geometry.seats.into()),
    }
}

/// Who may write a line (I1).
pub fn line_owner(layout: &Layout, region: Region, index: u64) -> String {
    let geometry = layout.geometry();
    let slot = |per: u64| format!("slot {}", index / per.max(1));
    let seat = |per: u64| format!("the machine of seat {}", index / per.max(1));
    match region {
        Region::Seat => seat(1),
        Region::Grant => seat(geometry.grant_lines()),
        Region::Binding => seat(geometry.bindings()),
        Region::Fence | Region::Death => seat(geometry.fence_lines()),
        Region::JoinBox => "any machine (a hint)".into(),
        Region::Identity => slot(1),
        Region::Summary => slot(geometry.summary_lines()),
        Region::Request => slot(geometry.request_lines()),
        Region::Intent => slot(INTENTS as u64),
        Region::Record => slot(geometry.records()),
        Region::Claim => slot(layout.claim_lines()),
        Region::FreeBox | Region::FreeAck => slot(geometry.slots.into()),
        Region::Stats => slot(geometry.stats_lines.into()),
        Region::ChunkHead => format!("the owner of chunk {index}"),
        Region::KeepMap => format!("the owner of chunk {}", index / geometry.keep_lines().max(1)),
        Region::Descriptor => format!("the owner of cell chunk {}", index / u64::from(geometry.cells_per_chunk.max(1))),
        Region::Hint => format!("the holder of lock {}", u64::from(FIRST_STRIPE_LOCK) + index / geometry.hint_lines_per_stripe().max(1)),
        Region::Pin => slot(geometry.pin_lines()),
        Region::CellClaim => slot(geometry.cell_claim_lines()),
        Region::Ask => slot(1),
        Region::Splitter => "any machine that has no place yet".into(),
        Region::Claimant => format!("the machine of place {index}"),
        Region::SeatClaim => format!("the machine of place {}", index / u64::from(geometry.seats)),
    }
}

/// Describes `line` as line `index` of `region`. Any bytes will do.
pub fn describe(lines: &Lines, region: Region, index: u64, line: &Line) -> Description {
    let layout = lines.layout();
    let (damage, fields) = with_line_of!(region, Form => {
        let damage = match lines.open::<Form>(index, line) {
            Ok(_) => None,
            Err(Error::BadLine { reason, .. }) => Some(reason),
            Err(_) => Some("cannot be read"),
        };
        (damage, bytemuck::cast::<Line, Form>(*line).fields(layout, index))
    });
    Description {
        name: line_name(layout, region, index),
        owner: line_owner(layout, region, index),
        damage,
        is_empty: damage.is_none() && line.0[4..].iter().all(|&byte| byte == 0),
        fields,
    }
}

trait Fields {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)>;
}

fn number(value: impl Into<u64>) -> Value {
    Value::Number(value.into())
}

fn id(bytes: [u8; 16]) -> Value {
    Value::Text(MachineId(bytes).to_string())
}

fn word(state: u32, names: &[(u32, &str)]) -> Value {
    let name = names.iter().find(|(value, _)| *value == state).map(|(_, name)| (*name).to_owned());
    Value::Text(name.unwrap_or_else(|| format!("unknown ({state})")))
}

fn flags(bits: u32, names: &[(u32, &str)]) -> Value {
    let known: Vec<&str> = names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
    let rest = names.iter().fold(bits, |bits, (bit, _)| bits & !bit);
    let text = known.join("+");
    Value::Text(match (text.is_empty(), rest) {
        (_, 0) => text,
        (true, rest) => format!("{rest:#x}"),
        (false, rest) => format!("{text}+{rest:#x}"),
    })
}

fn set_bits(bits: &[u8], first: u64) -> Value {
    let set = (0..bits.len() * 8).filter(|bit| bits[bit / 8] >> (bit % 8) & 1 == 1);
    Value::List(set.map(|bit| number(first + bit as u64)).collect())
}

/// The values that are not zero, each with the number of its slot, lock or place.
fn sparse<T: Copy>(what: &'static str, first: u64, values: &[T], is_set: impl Fn(T) -> bool, tell: impl Fn(T) -> Value) -> Value {
    let pairs = values.iter().enumerate().filter(|(_, value)| is_set(**value));
    Value::List(
        pairs
            .map(|(place, value)| {
                let mut group = vec![(what, number(first + place as u64))];
                match tell(*value) {
                    Value::Group(fields) => group.extend(fields),
                    other => group.push(("value", other)),
                }
                Value::Group(group)
            })
            .collect(),
    )
}

impl Fields for Seat {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        let beat = if self.beat == u64::MAX { Value::Text("resigned".into()) } else { number(self.beat) };
        vec![
            ("epoch", number(self.epoch)),
            ("beat", beat),
            ("machine", id(self.machine)),
            ("session", id(self.session)),
            ("generation", number(self.generation)),
            ("state", word(self.state, &[(0, "owned"), (Seat::RELEASED, "released")])),
        ]
    }
}

impl Fields for GrantLine {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = index % layout.geometry().grant_lines() * LOCKS_PER_GRANT as u64;
        let tell = |grant: Grant| {
            Value::Group(vec![
                ("grant", number(grant.number)),
                ("slot", number(grant.slot)),
                ("incarnation", number(grant.incarnation)),
                ("request", number(grant.request)),
                ("flags", flags(grant.flags.into(), &[(Grant::REPAIR.into(), "repair"), (Grant::RECALL.into(), "recall")])),
            ])
        };
        vec![("tag", number(self.tag)), ("grants", sparse("lock", first, &self.grants, |grant| grant != Grant::default(), tell))]
    }
}

impl Fields for Binding {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        let Binding { tag, incarnation, machine, nonce, .. } = *self;
        vec![("tag", number(tag)), ("incarnation", number(incarnation)), ("machine", id(machine)), ("nonce", id(nonce))]
    }
}

fn per_slot(layout: &Layout, index: u64, values: &[u32]) -> Value {
    let first = index % layout.geometry().fence_lines() * SLOTS_PER_FENCE as u64;
    sparse("slot", first, values, |value| value != 0, |value| Value::Group(vec![("incarnation", number(value))]))
}

impl Fields for FenceLine {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        vec![("fenced", per_slot(layout, index, &self.fenced))]
    }
}

impl Fields for DeathLine {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        vec![("dead", per_slot(layout, index, &self.dead))]
    }
}

impl Fields for JoinBox {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        vec![
            ("slot", number(self.slot)),
            ("machine", id(self.machine)),
            ("nonce", id(self.nonce)),
            ("previous", id(self.previous)),
            ("vouches", Value::Number(self.vouches().into())),
        ]
    }
}

impl Fields for Identity {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        vec![
            ("incarnation", number(self.incarnation)),
            ("state", word(self.state, &[(0, "never joined"), (Identity::LIVE, "live"), (Identity::LEFT, "left")])),
            ("acknowledged", number(self.acknowledged)),
            ("drained", number(self.drained)),
            ("machine", id(self.machine)),
            ("nonce", id(self.nonce)),
            ("reported slot", number(self.reported().map_or(0, |(slot, _)| slot))),
            ("reported incarnation", number(self.reported().map_or(0, |(_, incarnation)| incarnation))),
        ]
    }
}

impl Fields for Summary {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = index % layout.geometry().summary_lines() * VERSIONS_PER_SUMMARY as u64;
        let versions = sparse("line", first, &self.versions, |value| value != 0, |value| Value::Group(vec![("version", number(value))]));
        vec![("incarnation", number(self.incarnation)), ("heartbeat", number(self.heartbeat)), ("versions", versions)]
    }
}

impl Fields for RequestLine {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = index % layout.geometry().request_lines() * LOCKS_PER_REQUEST as u64;
        let names = [(Request::WANT, "want"), (Request::CLEAN, "clean"), (Request::DIRTY, "dirty")];
        let tell = |request: Request| Value::Group(vec![("request", number(request.number)), ("flags", flags(request.flags, &names))]);
        let requests = sparse("lock", first, &self.requests, |request| request != Request::default(), tell);
        vec![("incarnation", number(self.incarnation)), ("requests", requests)]
    }
}

impl Fields for Intent {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        let lines = self.lines.iter().take(self.count as usize).map(|&line| number(line)).collect();
        vec![
            ("incarnation", number(self.incarnation)),
            ("lock", number(self.lock)),
            ("grant", number(self.grant)),
            ("data", Value::Hex(self.data.into())),
            ("lines", Value::List(lines)),
        ]
    }
}

impl Fields for Record {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let number_of = index % layout.geometry().records();
        let table = layout.geometry().lock_table_records();
        let value = if number_of < table {
            ("allocated_locks", set_bits(&self.data, number_of * LOCKS_PER_RECORD as u64))
        } else {
            ("object", object(&bytemuck::cast(self.data), number_of - table))
        };
        vec![("grant", number(self.grant)), ("version", number(self.version)), ("incarnation", number(self.incarnation)), value]
    }
}

fn object(value: &ObjectValue, cell: u64) -> Value {
    let states = [(ObjectValue::EMPTY.into(), "empty"), (ObjectValue::LIVE.into(), "live"), (ObjectValue::TOMB.into(), "tombstone")];
    let name = &value.name[..usize::from(value.name_len).min(MAX_OBJECT_NAME_BYTES)];
    let mut fields = vec![("cell", number(cell)), ("state", word(value.state.into(), &states))];
    if value.state == ObjectValue::LIVE {
        fields.push(("name", Value::Text(String::from_utf8_lossy(name).into_owned())));
        fields.push(("offset", Value::Hex(value.offset)));
        fields.push(("len_bytes", number(value.len_bytes)));
        fields.push(("kind", word(value.kind.into(), &[(0, "root"), (ObjectValue::LISTENER.into(), "listener")])));
    }
    Value::Group(fields)
}

impl Fields for Claim {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = index % layout.claim_lines().max(1) * CHUNKS_PER_CLAIM as u64;
        vec![("incarnation", number(self.incarnation)), ("chunks", set_bits(&self.bits, first))]
    }
}

impl Fields for FreeBox {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let offsets = self.offsets.iter().filter(|offset| **offset != 0).map(|&offset| Value::Hex(offset)).collect();
        vec![
            ("to_slot", number(index % u64::from(layout.geometry().slots))),
            ("incarnation", number(self.incarnation)),
            ("receiver", number(self.receiver)),
            ("sequence", number(self.sequence)),
            ("offsets", Value::List(offsets)),
        ]
    }
}

impl Fields for FreeAck {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        vec![
            ("from_slot", number(index % u64::from(layout.geometry().slots))),
            ("incarnation", number(self.incarnation)),
            ("sender", number(self.sender)),
            ("sequence", number(self.sequence)),
        ]
    }
}

impl Fields for ChunkHead {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let states =
            [(ChunkHead::UNCUT, "uncut"), (ChunkHead::BLOCKS, "blocks"), (ChunkHead::RUN, "run"), (ChunkHead::INSIDE, "inside a run")];
        vec![
            ("offset", layout.chunk_offset(index).map_or(Value::Text("outside the pool".into()), Value::Hex)),
            ("state", word(self.state, &states)),
            ("slot", number(self.slot)),
            ("incarnation", number(self.incarnation)),
            ("block_bytes", number(self.block_bytes)),
            ("run", number(self.run)),
        ]
    }
}

impl Fields for KeepMap {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = index % layout.geometry().keep_lines().max(1) * BLOCKS_PER_KEEP as u64;
        vec![("incarnation", number(self.incarnation)), ("kept_blocks", set_bits(&self.bits, first))]
    }
}

impl Fields for StatsLine {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = (index % u64::from(layout.geometry().stats_lines.max(1))) as usize * COUNTERS_PER_STATS;
        let known = self.counters.iter().enumerate().filter_map(|(place, &value)| Some((Stat::at(first + place)?.name(), number(value))));
        std::iter::once(("incarnation", number(self.incarnation))).chain(known).collect()
    }
}

impl Fields for Descriptor {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let kinds = [(Descriptor::NO_CHECKSUM.into(), "none"), (Descriptor::XXH3.into(), "xxh3")];
        vec![
            ("offset", layout.cell(index).map_or(Value::Text("outside the pool".into()), |(offset, _)| Value::Hex(offset))),
            ("state", Value::Text(self.state_name().into())),
            ("owner", number(self.owner)),
            ("incarnation", number(self.incarnation)),
            ("seq", number(self.seq)),
            ("len_bytes", number(self.len_bytes)),
            ("namespace", id(self.namespace)),
            ("key", id(self.key)),
            ("checksum_kind", word(self.kind.into(), &kinds)),
            ("checksum", Value::Hex(self.checksum)),
        ]
    }
}

impl Fields for HintLine {
    fn fields(&self, _layout: &Layout, _index: u64) -> Vec<(&'static str, Value)> {
        let hints = self.iter().map(|hint| match hint {
            Hint::Empty => Value::Text("empty".into()),
            Hint::Tomb => Value::Text("tomb".into()),
            Hint::Cell { fingerprint, cell } => Value::Text(format!("{fingerprint:016x} -> cell {cell}")),
        });
        vec![("hints", Value::List(hints.collect()))]
    }
}

impl Fields for PinLine {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = index % layout.geometry().pin_lines().max(1) * CELLS_PER_PIN as u64;
        let used = (0..CELLS_PER_PIN).filter(|&place| self.nibble(place) != 0).map(|place| {
            let nibble = self.nibble(place);
            let pinned = if nibble & PinLine::PINNED != 0 { " pinned" } else { "" };
            Value::Text(format!("{} tick {}{pinned}", first + place as u64, nibble & PinLine::TICK))
        });
        vec![("incarnation", number(self.incarnation)), ("cells", Value::List(used.collect()))]
    }
}

impl Fields for CellClaim {
    fn fields(&self, layout: &Layout, index: u64) -> Vec<(&'static str, Value)> {
        let first = index % layout.geometry().cell_claim_lines().max(1) * CHUNKS_PER_CELL_CLAIM as u64;
        vec![("incarnation", number(self.incarnation)), ("cell_chunks", set_bits(&self.bits, first))]
    }
}

impl Fields for Ask {
    fn fields(&self, _layout: &Layout, _index: u64) -> Vec<(&'static str, Value)> {
        let requests = [(Ask::EVICT, "evict"), (Ask::CLEAR, "clear"), (Ask::CLEAR_ALL, "clear all"), (Ask::ROOM, "room")];
        vec![
            ("incarnation", number(self.incarnation)),
            ("number", number(self.number)),
            ("what", word(self.what, &requests)),
            ("class", number(self.class)),
            ("namespace", id(self.namespace)),
            ("key", id(self.key)),
        ]
    }
}

impl Fields for Splitter {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        vec![("closed", number(self.closed)), ("attempt", id(self.attempt))]
    }
}

impl Fields for Claimant {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        vec![("ballot", number(self.ballot)), ("machine", id(self.machine))]
    }
}

impl Fields for SeatClaim {
    fn fields(&self, _: &Layout, _: u64) -> Vec<(&'static str, Value)> {
        vec![
            ("tag", number(self.tag)),
            ("generation", number(self.generation)),
            ("machine", id(self.machine)),
            ("session", id(self.session)),
            ("ended", id(self.ended)),
        ]
    }
}
