// SPDX-License-Identifier: Apache-2.0
//! `cxlctl free`: kept memory whose programs are gone.
//!
//! Their stores may still lie in their machine's caches, which would write them back onto the memory's next owner. So a block is
//! given back by the host that has its chunk: the machine on which it was allocated, or a host that adopted it after a proof of death,
//! which brought those caches out.

use crate::cli::FreeArgs;
use crate::fsck::take_alone;
use crate::inspect::{Names, kept_in};
use crate::output::{Exit, Failure, Out};
use crate::text::{bytes, safe};
use crate::wait;
use cxl_pool::Error;
use cxl_pool::alloc::{AllocConfig, Allocator, Block, LocalArea, block_of, owner_of};
use cxl_pool::fsck::{ObjectInfo, survey};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::objects::Objects;
use cxl_pool::pool::Pool;
use serde_json::json;

/// How long `--unnamed` watches for hosts, in milliseconds.
const LOOK_MS: u64 = 500;

/// A block that is to go, and the name that stands for it.
struct Target {
    block: Block,
    object: Option<ObjectInfo>,
}

impl Target {
    fn label(&self) -> String {
        let place = format!("{:#x} ({})", self.block.offset, bytes(self.block.len_bytes));
        self.object.as_ref().map_or(place.clone(), |object| format!("{} at {place}", name_of(object)))
    }
}

fn name_of(object: &ObjectInfo) -> String {
    safe(&String::from_utf8_lossy(&object.name))
}

pub fn run(pool: Option<&str>, args: &FreeArgs, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, false)?;
    let objects = survey(pool.lines(), &pool.superblock().seats())?.objects;
    let targets = if args.unnamed {
        drop(take_alone(&pool, LOOK_MS, "first: memory that they use would get other owners")?);
        find_unnamed(&pool, &Names::new(&objects))?
    } else {
        args.blocks.iter().map(|text| find_target(&pool, &objects, text)).collect::<Result<_, _>>()?
    };
    let left = match targets.is_empty() {
        true => Vec::new(),
        false => wait::as_host(pool.join(HostConfig::from_env()?)?, |host| free_all(&pool, host, &targets, args.timeout_ms))?,
    };
    let freed = || targets.iter().filter(|target| !left.iter().any(|(block, _)| *block == target.block));
    let json = || {
        let block = |block: &Block| json!({"offset": block.offset, "len_bytes": block.len_bytes});
        json!({"freed": freed().map(|target| block(&target.block)).collect::<Vec<_>>(),
            "left": left.iter().map(|(of, why)| json!({"offset": of.offset, "len_bytes": of.len_bytes, "why": why})).collect::<Vec<_>>()})
    };
    let text = || {
        let mut text: String = freed().map(|target| format!("freed {}\n", target.label())).collect();
        left.iter().for_each(|(block, why)| text.push_str(&format!("not freed: {:#x}: {why}\n", block.offset)));
        if targets.is_empty() { "every kept block has a name\n".into() } else { text }
    };
    out.answer(json, text)?;
    Ok(if left.is_empty() { Exit::Done } else { Exit::Failed })
}

/// Every kept block without a name.
fn find_unnamed(pool: &Pool, names: &Names) -> Result<Vec<Target>, Failure> {
    let mut targets = Vec::new();
    for chunk in 0..pool.layout().chunks() {
        for block in kept_in(pool, chunk)? {
            if names.of(&block).is_none() {
                targets.push(Target { block, object: None });
            }
        }
    }
    Ok(targets)
}

/// The block that an argument means.
fn find_target(pool: &Pool, objects: &[ObjectInfo], text: &str) -> Result<Target, Failure> {
    let object = objects.iter().find(|object| object.name == text.as_bytes());
    let offset = match object {
        Some(object) if object.is_listener => {
            return Err(Failure::new(Exit::Refused, format!("{} is the name of a listener, which takes it away itself", name_of(object))));
        }
        Some(object) => object.offset,
        None => offset_of(text).ok_or_else(|| Failure::usage(format!("{} is neither a name in the pool nor an offset", safe(text))))?,
    };
    let found = block_of(pool.lines(), offset)?.filter(|block| object.is_some() || block.offset == offset);
    let Some(block) = found else {
        return Err(Failure::new(
            Exit::Failed,
            format!("no kept block {} {offset:#x}", if object.is_some() { "is around" } else { "begins at" }),
        ));
    };
    let is_other = |other: &&ObjectInfo| in_block(other, &block) && object.is_none_or(|object| object.name != other.name);
    if let Some(other) = objects.iter().find(is_other) {
        let message = format!("the block at {:#x} has the name {}: free it by that name", block.offset, name_of(other));
        return Err(Failure::new(Exit::Refused, message));
    }
    Ok(Target { block, object: object.cloned() })
}

fn offset_of(text: &str) -> Option<u64> {
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u64::from_str_radix(digits, 16).ok())
}

pub(crate) fn in_block(object: &ObjectInfo, block: &Block) -> bool {
    object.offset.checked_sub(block.offset).is_some_and(|within| within < block.len_bytes)
}

/// Has the blocks freed; those that are left, and why. The ones of other hosts are adopted where those are proven dead.
fn free_all(pool: &Pool, host: &Host, targets: &[Target], timeout_ms: u64) -> Result<Vec<(Block, String)>, Failure> {
    let config = AllocConfig { lock_timeout_ms: Some(timeout_ms), ..AllocConfig::default() };
    let allocator = Allocator::attach(host, LocalArea::of(host)?, config)?;
    let (mut waiting, mut requested): (Vec<&Target>, Vec<&Target>) = (targets.iter().collect(), Vec::new());
    wait::until(timeout_ms, || {
        allocator.adopt_dead()?;
        allocator.service_round()?;
        for target in std::mem::take(&mut waiting) {
            if owner_of(pool.lines(), target.block.offset)?.is_some_and(|(slot, _)| slot == host.slot()) {
                free(pool, host, &allocator, target, timeout_ms)?;
                requested.push(target);
            } else {
                waiting.push(target);
            }
        }
        for target in std::mem::take(&mut requested) {
            if block_of(pool.lines(), target.block.offset)?.is_some() {
                requested.push(target);
            }
        }
        Ok((waiting.is_empty() && requested.is_empty()).then_some(()))
    })?;
    allocator.close()?;
    let mut left: Vec<_> =
        requested.into_iter().map(|target| (target.block, "its owner was asked and has not freed it yet".into())).collect();
    for target in waiting {
        left.push((target.block, why_not(pool, target)?));
    }
    Ok(left)
}

/// The name goes first: with it, others find the block.
fn free(pool: &Pool, host: &Host, allocator: &Allocator, target: &Target, timeout_ms: u64) -> Result<(), Failure> {
    if let Some(object) = &target.object {
        Objects::new(host).destroy_at(&object.name, object.offset, timeout_ms)?;
    }
    match pool.lines().memory().flush_range(target.block.offset, target.block.len_bytes) {
        // Nothing of a process of this machine is left of what cannot be reached.
        Err(Error::Poisoned { .. }) => {}
        other => other?,
    }
    pool.lines().memory().fence_all();
    Ok(allocator.free(target.block.offset)?)
}

fn why_not(pool: &Pool, target: &Target) -> Result<String, Failure> {
    Ok(match owner_of(pool.lines(), target.block.offset)? {
        Some((slot, _)) => format!("it belongs to the host in slot {slot}: run this on the machine of that host (cxlctl hosts)"),
        None => "its host is gone and not proven dead: cxlctl hosts declare-dead, or start a host on that machine".into(),
    })
}
