// SPDX-License-Identifier: Apache-2.0
//! `cxlctl inspect`.

use crate::cli::{InspectArgs, What};
use crate::output::{Exit, Failure, Out};
use crate::text::{bytes, list, safe, table};
use cxl_pool::alloc::{Block, block_of, owner_of};
use cxl_pool::fsck::{Description, ObjectInfo, Value as Field, describe, survey};
use cxl_pool::limits::DEVICE_HEADER_BYTES;
use cxl_pool::line::Line;
use cxl_pool::media::{ChunkHead, Region, SUPERBLOCK_BYTES, Superblock, uuid_text};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::Pool;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The requested lines of a region.
enum Wanted {
    /// Lines that are not empty or do not verify.
    Used,
    All,
    One(u64),
}

pub fn run(pool: Option<&str>, args: &InspectArgs, out: &mut Out) -> Result<Exit, Failure> {
    let wanted = match args.index.as_deref() {
        None => Wanted::Used,
        Some("all") => Wanted::All,
        Some(text) => Wanted::One(text.parse().map_err(|_| Failure::usage(format!("{text:?} is neither a line number nor \"all\"")))?),
    };
    let pool = crate::pool::open(pool, true)?;
    match args.what {
        What::Lines(region) => lines(&pool, region, &wanted, args.raw, out),
        What::Superblock => superblocks(&pool, &wanted, args.raw, out),
        What::Locks => locks(&pool, &wanted, out),
        What::Objects => objects(&pool, &wanted, out),
        What::Blocks => blocks(&pool, &wanted, out),
    }
}

fn out_of_range(what: &str, index: u64, count: u64) -> Failure {
    Failure::usage(format!("there is no {what} {index}: the pool has {count}"))
}

/// Writes the items of a JSON array one by one, so that a large region needs no memory.
struct Items {
    count: u64,
}

impl Items {
    fn begin(out: &mut Out) -> Result<Items, Failure> {
        if out.is_json() {
            out.text("[")?;
        }
        Ok(Items { count: 0 })
    }

    fn add(&mut self, out: &mut Out, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) -> Result<(), Failure> {
        if out.is_json() {
            out.text(if self.count == 0 { "\n" } else { ",\n" })?;
            out.text(json().to_string())?;
        } else {
            out.text(text())?;
        }
        self.count += 1;
        Ok(())
    }

    fn end(self, out: &mut Out, nothing: &str) -> Result<(), Failure> {
        if out.is_json() {
            return out.text("\n]\n");
        }
        if self.count == 0 { out.line(nothing) } else { Ok(()) }
    }
}

fn lines(pool: &Pool, region: Region, wanted: &Wanted, raw: bool, out: &mut Out) -> Result<Exit, Failure> {
    let count = pool.layout().span(region).lines;
    let indexes = match *wanted {
        Wanted::One(index) if index >= count => return Err(out_of_range("such line", index, count)),
        Wanted::One(index) => index..index + 1,
        _ => 0..count,
    };
    let mut items = Items::begin(out)?;
    let mut exit = Exit::Done;
    for index in indexes {
        if out.is_closed() {
            break;
        }
        let offset = pool.layout().line_offset(region, index)?;
        let line = match pool.lines().fetch_raw(offset) {
            Ok(line) => line,
            Err(error) => {
                exit = Exit::Failed;
                items.add(out, || json!({"index": index, "error": error.to_string()}), || format!("line {index}: {error}\n"))?;
                continue;
            }
        };
        let told = describe(pool.lines(), region, index, &line);
        if told.damage.is_some() {
            exit = Exit::Failed;
        }
        if !told.is_empty || !matches!(wanted, Wanted::Used) {
            items.add(out, || line_json(&told, index, offset, &line, raw), || line_text(&told, offset, &line, raw))?;
        }
    }
    items.end(out, "every line is as the format wrote it: empty")?;
    Ok(exit)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Sixteen bytes a row, as hexadecimal digits and as text.
fn hex_rows(bytes: &[u8], first: u64) -> String {
    let row = |(number, row): (usize, &[u8])| {
        let digits: Vec<String> = row.chunks(4).map(hex).collect();
        let text: String = row.iter().map(|&byte| if byte.is_ascii_graphic() { char::from(byte) } else { '.' }).collect();
        format!("    {:#012x}  {:<35}  {text}\n", first + 16 * number as u64, digits.join(" "))
    };
    bytes.chunks(16).enumerate().map(row).collect()
}

fn line_json(told: &Description, index: u64, offset: u64, line: &Line, raw: bool) -> Value {
    let mut value = json!({"name": told.name, "index": index, "offset": offset, "owner": told.owner, "valid": told.damage.is_none(),
        "damage": told.damage, "fields": group_json(&told.fields)});
    if raw {
        value["raw"] = hex(&line.0).into();
    }
    value
}

fn group_json(fields: &[(&'static str, Field)]) -> Value {
    Value::Object(fields.iter().map(|(name, value)| ((*name).to_owned(), field_json(value))).collect::<Map<_, _>>())
}

fn field_json(value: &Field) -> Value {
    match value {
        Field::Number(number) | Field::Hex(number) => (*number).into(),
        Field::Text(text) => text.clone().into(),
        Field::List(values) => values.iter().map(field_json).collect::<Vec<_>>().into(),
        Field::Group(fields) => group_json(fields),
    }
}

fn line_text(told: &Description, offset: u64, line: &Line, raw: bool) -> String {
    let state = told.damage.map_or("valid".to_owned(), |damage| format!("NOT VALID: {damage}"));
    let mut text = format!("{} at {offset:#x}, written by {}: {state}\n", told.name, told.owner);
    if told.is_empty {
        text.push_str("  empty\n");
    } else {
        for (name, value) in &told.fields {
            text.push_str(&field_text(name, value));
        }
    }
    if raw {
        text.push_str(&hex_rows(&line.0, offset));
    }
    text
}

fn field_text(name: &str, value: &Field) -> String {
    match value {
        Field::List(values) if values.iter().any(|value| matches!(value, Field::Group(_))) => {
            let rows: String = values.iter().map(|value| format!("    {}\n", short(value))).collect();
            format!("  {name}:\n{rows}")
        }
        value => format!("  {name}: {}\n", short(value)),
    }
}

fn short(value: &Field) -> String {
    match value {
        Field::Number(number) => number.to_string(),
        Field::Hex(number) => format!("{number:#x}"),
        Field::Text(text) => safe(text),
        Field::List(values) => list(&values.iter().map(short).collect::<Vec<_>>()),
        Field::Group(fields) => fields.iter().map(|(name, value)| format!("{name} {}", short(value))).collect::<Vec<_>>().join(", "),
    }
}

fn superblocks(pool: &Pool, wanted: &Wanted, raw: bool, out: &mut Out) -> Result<Exit, Failure> {
    let devices = pool.devices();
    if let Wanted::One(index) = *wanted
        && index >= devices.len() as u64
    {
        return Err(out_of_range("device", index, devices.len() as u64));
    }
    let mut items = Items::begin(out)?;
    let mut exit = Exit::Done;
    for (index, device) in devices.iter().enumerate() {
        if matches!(*wanted, Wanted::One(one) if one != index as u64) {
            continue;
        }
        let offset = index as u64 * DEVICE_HEADER_BYTES;
        let mut held = vec![0; SUPERBLOCK_BYTES];
        let memory = pool.lines().memory();
        memory.flush_range(offset, SUPERBLOCK_BYTES as u64)?;
        memory.fence_all();
        memory.copy_out(offset, &mut held)?;
        let decoded = Superblock::decode(&device.label(), &held);
        let damage = decoded.as_ref().err().map(ToString::to_string);
        if damage.is_some() {
            exit = Exit::Failed;
        }
        let fields: Vec<(&str, Value)> = match &decoded {
            Ok(superblock) => vec![
                ("uuid", uuid_text(superblock.uuid()).into()),
                ("incarnation", format!("{:#x}", superblock.incarnation()).into()),
                ("version", format!("{}.{}", superblock.version().0, superblock.version().1).into()),
                ("features", json!(superblock.features())),
                ("device_index", superblock.device_index().into()),
                ("seat_machines", superblock.seats().into_iter().map(crate::info::machine).collect::<Vec<_>>().into()),
                ("devices", superblock.devices().iter().map(|device| MachineId(device.id).to_string()).collect::<Vec<_>>().into()),
                ("layout_digest", format!("{:#x}", superblock.layout().digest()).into()),
            ],
            Err(_) => Vec::new(),
        };
        let to_json = || {
            let fields: Map<String, Value> = fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            let mut value = json!({"device": device.name, "index": index, "valid": damage.is_none(), "damage": damage, "fields": fields});
            if raw {
                value["raw"] = hex(&held).into();
            }
            value
        };
        let to_text = || {
            let state = damage.as_ref().map_or("valid".to_owned(), |damage| format!("NOT VALID: {damage}"));
            let mut text = format!("superblock of device {index}, {}: {state}\n", safe(&device.name));
            fields.iter().for_each(|(name, value)| text.push_str(&format!("  {name}: {value}\n")));
            if raw {
                text.push_str(&hex_rows(&held, offset));
            }
            text
        };
        items.add(out, to_json, to_text)?;
    }
    items.end(out, "")?;
    Ok(exit)
}

fn locks(pool: &Pool, wanted: &Wanted, out: &mut Out) -> Result<Exit, Failure> {
    let count = u64::from(pool.layout().geometry().locks);
    let mut locks = survey(pool.lines(), &pool.superblock().seats())?.locks;
    if let Wanted::One(index) = *wanted {
        if index >= count {
            return Err(out_of_range("lock", index, count));
        }
        locks.retain(|lock| u64::from(lock.lock) == index);
    }
    let to_json = || {
        let locks = locks.iter().map(|lock| {
            json!({"lock": lock.lock, "allocated": lock.allocated, "grant": lock.grant, "holder_slot": lock.holder.map(|(slot, _)| slot),
                "holder_incarnation": lock.holder.map(|(_, incarnation)| incarnation), "held": lock.is_held,
                "needs_repair": lock.needs_repair, "waiting_slots": lock.waiting})
        });
        locks.collect::<Vec<_>>().into()
    };
    let to_text = || {
        let mut rows = vec![["lock", "allocated", "grant", "last given to", "held", "repair", "waiting"].map(String::from).to_vec()];
        let word = |is: bool| if is { "yes" } else { "no" }.to_owned();
        for lock in &locks {
            rows.push(vec![
                lock.lock.to_string(),
                lock.allocated.map_or("?".into(), word),
                lock.grant.to_string(),
                lock.holder.map_or("-".into(), |(slot, incarnation)| format!("slot {slot}.{incarnation}")),
                word(lock.is_held),
                word(lock.needs_repair),
                list(&lock.waiting),
            ]);
        }
        if locks.is_empty() { "no lock was ever used\n".into() } else { table(&rows) }
    };
    out.answer(to_json, to_text)?;
    Ok(Exit::Done)
}

fn objects(pool: &Pool, wanted: &Wanted, out: &mut Out) -> Result<Exit, Failure> {
    let count = u64::from(pool.layout().geometry().objects);
    let mut objects = survey(pool.lines(), &pool.superblock().seats())?.objects;
    if let Wanted::One(index) = *wanted {
        if index >= count {
            return Err(out_of_range("object cell", index, count));
        }
        objects.retain(|object| object.cell == index);
    }
    let to_json = || {
        let objects = objects.iter().map(|object| {
            json!({"cell": object.cell, "name": String::from_utf8_lossy(&object.name), "name_hex": hex(&object.name),
                "offset": object.offset, "len_bytes": object.len_bytes, "listener": object.is_listener, "writer_slot": object.writer,
                "doubtful": object.is_doubtful})
        });
        objects.collect::<Vec<_>>().into()
    };
    let to_text = || {
        let mut rows = vec![["cell", "name", "offset", "size", "for", "writer", ""].map(String::from).to_vec()];
        for object in &objects {
            let size = if object.len_bytes == 0 { "-".into() } else { bytes(object.len_bytes) };
            rows.push(vec![
                object.cell.to_string(),
                safe(&String::from_utf8_lossy(&object.name)),
                format!("{:#x}", object.offset),
                size,
                if object.is_listener { "listener" } else { "-" }.into(),
                format!("slot {}", object.writer),
                if object.is_doubtful { "doubtful".into() } else { String::new() },
            ]);
        }
        if objects.is_empty() { "no object is bound\n".into() } else { table(&rows) }
    };
    out.answer(to_json, to_text)?;
    Ok(Exit::Done)
}

fn blocks(pool: &Pool, wanted: &Wanted, out: &mut Out) -> Result<Exit, Failure> {
    let layout = pool.layout();
    let chunks = match *wanted {
        Wanted::One(chunk) if chunk >= layout.chunks() => return Err(out_of_range("chunk", chunk, layout.chunks())),
        Wanted::One(chunk) => chunk..chunk + 1,
        _ => 0..layout.chunks(),
    };
    // The text of all chunks in use has no names.
    let has_names = out.is_json() || !matches!(wanted, Wanted::Used);
    let objects = if has_names { survey(pool.lines(), &pool.superblock().seats())?.objects } else { Vec::new() };
    let names = Names::new(&objects);
    let mut items = Items::begin(out)?;
    let mut exit = Exit::Done;
    for chunk in chunks {
        if out.is_closed() {
            break;
        }
        let start = layout.chunk_offset(chunk)?;
        let told = chunk_state(pool, chunk, start);
        let (state, owner, kept) = match told {
            Ok(told) => told,
            Err(error) => {
                exit = Exit::Failed;
                items.add(out, || json!({"chunk": chunk, "error": error.to_string()}), || format!("chunk {chunk}: {error}\n"))?;
                continue;
            }
        };
        if matches!(wanted, Wanted::Used) && owner.is_none() && kept.is_empty() {
            continue;
        }
        let to_json = || {
            let block = |block: &Block| json!({"offset": block.offset, "len_bytes": block.len_bytes, "name": names.of(block)});
            json!({"chunk": chunk, "offset": start, "state": state, "owner_slot": owner.map(|(slot, _)| slot),
                "owner_incarnation": owner.map(|(_, incarnation)| incarnation), "kept": kept.iter().map(block).collect::<Vec<_>>()})
        };
        let to_text = || {
            let owner = owner.map_or("no live host".into(), |(slot, incarnation)| format!("slot {slot}.{incarnation}"));
            let size: u64 = kept.iter().map(|block| block.len_bytes).sum();
            let mut text = format!("chunk {chunk} at {start:#x}: {state}, owned by {owner}, {} kept blocks, {}\n", kept.len(), bytes(size));
            if !matches!(wanted, Wanted::Used) {
                let name = |block: &Block| names.of(block).map_or("without a name".into(), |name| safe(&name));
                kept.iter()
                    .for_each(|block| text.push_str(&format!("  {:#x}  {}  {}\n", block.offset, bytes(block.len_bytes), name(block))));
            }
            text
        };
        items.add(out, to_json, to_text)?;
    }
    items.end(out, "no chunk has an owner, and no block is kept")?;
    Ok(exit)
}

/// Names that stand for something in the pool, by place.
pub struct Names(BTreeMap<u64, String>);

impl Names {
    /// Of these objects.
    pub fn new(objects: &[ObjectInfo]) -> Names {
        Names(objects.iter().map(|object| (object.offset, String::from_utf8_lossy(&object.name).into_owned())).collect())
    }

    /// A name of a block, or of something in it.
    pub fn of(&self, block: &Block) -> Option<String> {
        self.0.range(block.offset..block.offset + block.len_bytes).next().map(|(_, name)| name.clone())
    }
}

/// What a chunk is cut into, who has it, its kept blocks.
type ChunkState = (String, Option<(u16, u32)>, Vec<Block>);

fn chunk_state(pool: &Pool, chunk: u64, start: u64) -> cxl_pool::Result<ChunkState> {
    let head: ChunkHead = pool.lines().fetch(chunk)?;
    let state = match head.state {
        ChunkHead::UNCUT => "not cut".into(),
        ChunkHead::BLOCKS => format!("blocks of {}", bytes(head.block_bytes)),
        ChunkHead::RUN => format!("a block of {} chunks", head.run),
        _ => format!("inside the block of chunk {}", head.run),
    };
    Ok((state, owner_of(pool.lines(), start)?, kept_in(pool, chunk)?))
}

/// The kept blocks of a chunk; one of several chunks is listed with its first one.
pub fn kept_in(pool: &Pool, chunk: u64) -> cxl_pool::Result<Vec<Block>> {
    let (head, start): (ChunkHead, u64) = (pool.lines().fetch(chunk)?, pool.layout().chunk_offset(chunk)?);
    let chunk_bytes = pool.layout().geometry().chunk_bytes;
    let step = match head.state {
        ChunkHead::BLOCKS if head.block_bytes >= 64 && head.block_bytes <= chunk_bytes => head.block_bytes,
        _ => chunk_bytes,
    };
    let mut kept = Vec::new();
    for place in 0..if head.state == ChunkHead::INSIDE { 0 } else { chunk_bytes / step } {
        kept.extend(block_of(pool.lines(), start + place * step)?);
    }
    Ok(kept)
}
