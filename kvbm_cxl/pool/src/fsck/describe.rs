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

/// What a line of each form says. Its index tells which slots, locks or chunks it is of.
macro_rules! fields {
    ($($form:ident |$line:ident, $layout:tt, $index:tt| $fields:expr;)*) => {
        $(impl Fields for $form {
            fn fields(&self, $layout: &Layout, $index: u64) -> Vec<(&'static str, Value)> {
                let $line = self;
                $fields
            }
        })*
    };
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

fn per_slot(layout: &Layout, index: u64, values: &[u32]) -> Value {
    let first = index % layout.geometry().fence_lines() * SLOTS_PER_FENCE as u64;
    sparse("slot", first, values, |value| value != 0, |value| Value::Group(vec![("incarnation", number(value))]))
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

fields! {
    Seat |line, _, _| {
        let beat = if line.beat == u64::MAX { Value::Text("resigned".into()) } else { number(line.beat) };
        vec![
            ("epoch", number(line.epoch)),
            ("beat", beat),
            ("machine", id(line.machine)),
            ("session", id(line.session)),
            ("generation", number(line.generation)),
            ("state", word(line.state, &[(0, "owned"), (Seat::RELEASED, "released")])),
        ]
    };
    GrantLine |line, layout, index| {
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
        vec![("tag", number(line.tag)), ("grants", sparse("lock", first, &line.grants, |grant| grant != Grant::default(), tell))]
    };
    Binding |line, _, _| {
        let Binding { tag, incarnation, machine, nonce, .. } = *line;
        vec![("tag", number(tag)), ("incarnation", number(incarnation)), ("machine", id(machine)), ("nonce", id(nonce))]
    };
    FenceLine |line, layout, index| vec![("fenced", per_slot(layout, index, &line.fenced))];
    DeathLine |line, layout, index| vec![("dead", per_slot(layout, index, &line.dead))];
    JoinBox |line, _, _| vec![
        ("slot", number(line.slot)),
        ("machine", id(line.machine)),
        ("nonce", id(line.nonce)),
        ("previous", id(line.previous)),
        ("vouches", Value::Number(line.vouches().into())),
    ];
    Identity |line, _, _| vec![
        ("incarnation", number(line.incarnation)),
        ("state", word(line.state, &[(0, "never joined"), (Identity::LIVE, "live"), (Identity::LEFT, "left")])),
        ("acknowledged", number(line.acknowledged)),
        ("drained", number(line.drained)),
        ("machine", id(line.machine)),
        ("nonce", id(line.nonce)),
        ("reported slot", number(line.reported().map_or(0, |(slot, _)| slot))),
        ("reported incarnation", number(line.reported().map_or(0, |(_, incarnation)| incarnation))),
    ];
    Summary |line, layout, index| {
        let first = index % layout.geometry().summary_lines() * VERSIONS_PER_SUMMARY as u64;
        let versions = sparse("line", first, &line.versions, |value| value != 0, |value| Value::Group(vec![("version", number(value))]));
        vec![("incarnation", number(line.incarnation)), ("heartbeat", number(line.heartbeat)), ("versions", versions)]
    };
    RequestLine |line, layout, index| {
        let first = index % layout.geometry().request_lines() * LOCKS_PER_REQUEST as u64;
        let names = [(Request::WANT, "want"), (Request::CLEAN, "clean"), (Request::DIRTY, "dirty")];
        let tell = |request: Request| Value::Group(vec![("request", number(request.number)), ("flags", flags(request.flags, &names))]);
        let requests = sparse("lock", first, &line.requests, |request| request != Request::default(), tell);
        vec![("incarnation", number(line.incarnation)), ("requests", requests)]
    };
    Intent |line, _, _| {
        let lines = line.lines.iter().take(line.count as usize).map(|&place| number(place)).collect();
        vec![
            ("incarnation", number(line.incarnation)),
            ("lock", number(line.lock)),
            ("grant", number(line.grant)),
            ("data", Value::Hex(line.data.into())),
            ("lines", Value::List(lines)),
        ]
    };
    Record |line, layout, index| {
        let number_of = index % layout.geometry().records();
        let table = layout.geometry().lock_table_records();
        let value = if number_of < table {
            ("allocated_locks", set_bits(&line.data, number_of * LOCKS_PER_RECORD as u64))
        } else {
            ("object", object(&bytemuck::cast(line.data), number_of - table))
        };
        vec![("grant", number(line.grant)), ("version", number(line.version)), ("incarnation", number(line.incarnation)), value]
    };
    Claim |line, layout, index| {
        let first = index % layout.claim_lines().max(1) * CHUNKS_PER_CLAIM as u64;
        vec![("incarnation", number(line.incarnation)), ("chunks", set_bits(&line.bits, first))]
    };
    FreeBox |line, layout, index| {
        let offsets = line.offsets.iter().filter(|offset| **offset != 0).map(|&offset| Value::Hex(offset)).collect();
        vec![
            ("to_slot", number(index % u64::from(layout.geometry().slots))),
            ("incarnation", number(line.incarnation)),
            ("receiver", number(line.receiver)),
            ("sequence", number(line.sequence)),
            ("offsets", Value::List(offsets)),
        ]
    };
    FreeAck |line, layout, index| vec![
        ("from_slot", number(index % u64::from(layout.geometry().slots))),
        ("incarnation", number(line.incarnation)),
        ("sender", number(line.sender)),
        ("sequence", number(line.sequence)),
    ];
    ChunkHead |line, layout, index| {
        let states =
            [(ChunkHead::UNCUT, "uncut"), (ChunkHead::BLOCKS, "blocks"), (ChunkHead::RUN, "run"), (ChunkHead::INSIDE, "inside a run")];
        vec![
            ("offset", layout.chunk_offset(index).map_or(Value::Text("outside the pool".into()), Value::Hex)),
            ("state", word(line.state, &states)),
            ("slot", number(line.slot)),
            ("incarnation", number(line.incarnation)),
            ("block_bytes", number(line.block_bytes)),
            ("run", number(line.run)),
        ]
    };
    KeepMap |line, layout, index| {
        let first = index % layout.geometry().keep_lines().max(1) * BLOCKS_PER_KEEP as u64;
        vec![("incarnation", number(line.incarnation)), ("kept_blocks", set_bits(&line.bits, first))]
    };
    StatsLine |line, layout, index| {
        let first = (index % u64::from(layout.geometry().stats_lines.max(1))) as usize * COUNTERS_PER_STATS;
        let known = line.counters.iter().enumerate().filter_map(|(place, &value)| Some((Stat::at(first + place)?.name(), number(value))));
        std::iter::once(("incarnation", number(line.incarnation))).chain(known).collect()
    };
    Descriptor |line, layout, index| {
        let kinds = [(Descriptor::NO_CHECKSUM.into(), "none"), (Descriptor::XXH3.into(), "xxh3")];
        vec![
            ("offset", layout.cell(index).map_or(Value::Text("outside the pool".into()), |(offset, _)| Value::Hex(offset))),
            ("state", Value::Text(line.state_name().into())),
            ("owner", number(line.owner)),
            ("incarnation", number(line.incarnation)),
            ("seq", number(line.seq)),
            ("len_bytes", number(line.len_bytes)),
            ("namespace", id(line.namespace)),
            ("key", id(line.key)),
            ("checksum_kind", word(line.kind.into(), &kinds)),
            ("checksum", Value::Hex(line.checksum)),
        ]
    };
    HintLine |line, _, _| {
        let hints = line.iter().map(|hint| match hint {
            Hint::Empty => Value::Text("empty".into()),
            Hint::Tomb => Value::Text("tomb".into()),
            Hint::Cell { fingerprint, cell } => Value::Text(format!("{fingerprint:016x} -> cell {cell}")),
        });
        vec![("hints", Value::List(hints.collect()))]
    };
    PinLine |line, layout, index| {
        let first = index % layout.geometry().pin_lines().max(1) * CELLS_PER_PIN as u64;
        let used = (0..CELLS_PER_PIN).filter(|&place| line.nibble(place) != 0).map(|place| {
            let nibble = line.nibble(place);
            let pinned = if nibble & PinLine::PINNED != 0 { " pinned" } else { "" };
            Value::Text(format!("{} tick {}{pinned}", first + place as u64, nibble & PinLine::TICK))
        });
        vec![("incarnation", number(line.incarnation)), ("cells", Value::List(used.collect()))]
    };
    CellClaim |line, layout, index| {
        let first = index % layout.geometry().cell_claim_lines().max(1) * CHUNKS_PER_CELL_CLAIM as u64;
        vec![("incarnation", number(line.incarnation)), ("cell_chunks", set_bits(&line.bits, first))]
    };
    Ask |line, _, _| {
        let requests = [(Ask::EVICT, "evict"), (Ask::CLEAR, "clear"), (Ask::CLEAR_ALL, "clear all"), (Ask::ROOM, "room")];
        vec![
            ("incarnation", number(line.incarnation)),
            ("number", number(line.number)),
            ("what", word(line.what, &requests)),
            ("class", number(line.class)),
            ("namespace", id(line.namespace)),
            ("key", id(line.key)),
        ]
    };
    Splitter |line, _, _| vec![("closed", number(line.closed)), ("attempt", id(line.attempt))];
    Claimant |line, _, _| vec![("ballot", number(line.ballot)), ("machine", id(line.machine))];
    SeatClaim |line, _, _| vec![
        ("tag", number(line.tag)),
        ("generation", number(line.generation)),
        ("machine", id(line.machine)),
        ("session", id(line.session)),
        ("ended", id(line.ended)),
    ];
}
