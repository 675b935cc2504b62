// SPDX-License-Identifier: Apache-2.0
//! What the tier is compared with: reads by NIXL UCX from another process's G2, and a G3 by NIXL POSIX.
//!
//! KVBM's own executor needs CUDA (`TransferManager` makes a context), so the transfers are made here as it makes them where blocks are in
//! one piece: a descriptor for each block, one request for the batch, which is posted and asked after until it is done.

use crate::Result;
use crate::g2::G2;
use crate::peers::{number, serve, size};
use dynamo_memory::nixl::{MemType, NixlAgent, NixlDescriptor, RegistrationHandle, XferDescList, XferOp};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Instant;

/// G2 that a backend of NIXL knows.
struct Known {
    g2: G2,
    _handle: RegistrationHandle,
}

impl Known {
    fn new(agent: &NixlAgent, block_bytes: usize, num_blocks: usize) -> Result<Known> {
        let g2 = G2::new(agent.clone(), block_bytes, num_blocks)?;
        let (addr, size) = (g2.start(0)? as u64, block_bytes * num_blocks);
        let handle = agent.raw_agent().register_memory(&NixlDescriptor { addr, size, mem_type: MemType::Dram, device_id: 0 }, None)?;
        Ok(Known { g2, _handle: handle })
    }
}

/// Seconds for a batch of blocks between this G2 and a place where they lie behind one another from `start` on.
fn transfer(agent: &NixlAgent, op: XferOp, here: &G2, batch: usize, there: (MemType, usize, u64), peer: &str) -> Result<f64> {
    let begun = Instant::now();
    let (kind, start, device) = there;
    let (mut local, mut remote) = (XferDescList::new(MemType::Dram)?, XferDescList::new(kind)?);
    for id in 0..batch {
        local.add_desc(here.start(id)?, here.block_bytes, 0);
        remote.add_desc(start + id * here.block_bytes, here.block_bytes, device);
    }
    let agent = agent.raw_agent();
    let request = agent.create_xfer_req(op, &local, &remote, peer, None)?;
    if agent.post_xfer_req(&request, None)? {
        while !agent.get_xfer_status(&request)?.is_success() {
            std::hint::spin_loop();
        }
    }
    Ok(begun.elapsed().as_secs_f64())
}

pub fn source() -> Result<()> {
    let agent = NixlAgent::with_backends("figures-source", &["UCX"])?;
    let mut known: Option<Known> = None;
    serve(|words| match words[0] {
        "offer" => {
            let offered = known.insert(Known::new(&agent, size(words, 1)?, size(words, 2)?)?);
            let metadata: String = agent.raw_agent().get_local_md()?.iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(format!("{} {metadata}", offered.g2.start(0)?))
        }
        "fill" => {
            known.as_ref().ok_or("nothing was offered")?.g2.fill(size(words, 1)?, number(words, 2)?)?;
            Ok(String::new())
        }
        other => Err(format!("{other} is no ask").into()),
    })
}

/// A process that reads that G2.
pub fn reader() -> Result<()> {
    let agent = NixlAgent::with_backends("figures-reader", &["UCX"])?;
    let mut known: Option<(Known, usize)> = None;
    let mut peer = String::new();
    serve(|words| match words[0] {
        "know" => {
            let hex = words.get(4).ok_or("no metadata")?;
            let byte = |at: usize| hex.get(at..at + 2).map(|digits| u8::from_str_radix(digits, 16));
            let metadata = (0..hex.len()).step_by(2).filter_map(byte).collect::<std::result::Result<Vec<u8>, _>>()?;
            peer = agent.raw_agent().load_remote_md(&metadata)?;
            known = Some((Known::new(&agent, size(words, 1)?, size(words, 2)?)?, size(words, 3)?));
            Ok(String::new())
        }
        "read" => {
            let (known, start) = known.as_ref().ok_or("nothing is known")?;
            let (batch, seed) = (size(words, 1)?, number(words, 2)?);
            let seconds = transfer(&agent, XferOp::Read, &known.g2, batch, (MemType::Dram, *start, 0), &peer)?;
            known.g2.check(batch, seed)?;
            Ok(seconds.to_string())
        }
        other => Err(format!("{other} is no ask").into()),
    })
}

/// A process with a G3: a file in `directory`.
pub fn disk(directory: &Path) -> Result<()> {
    let name = "figures-disk";
    let agent = NixlAgent::with_backends(name, &["POSIX"])?;
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(directory.join("g3"))?;
    let device_id = u64::try_from(file.as_raw_fd())?;
    let mut known: Option<(Known, Known, RegistrationHandle)> = None;
    serve(|words| match words[0] {
        "know" => {
            let (block_bytes, blocks) = (size(words, 1)?, size(words, 2)?);
            let bytes = block_bytes * blocks;
            file.set_len(bytes as u64)?;
            let descriptor = NixlDescriptor { addr: 0, size: bytes, mem_type: MemType::File, device_id };
            let handle = agent.raw_agent().register_memory(&descriptor, None)?;
            known = Some((Known::new(&agent, block_bytes, blocks)?, Known::new(&agent, block_bytes, blocks)?, handle));
            Ok(String::new())
        }
        "round" => {
            let (from, to, _) = known.as_ref().ok_or("nothing is known")?;
            let (batch, seed) = (size(words, 1)?, number(words, 2)?);
            from.g2.fill(batch, seed)?;
            let place = (MemType::File, 0, device_id);
            let write = transfer(&agent, XferOp::Write, &from.g2, batch, place, name)?;
            let read = transfer(&agent, XferOp::Read, &to.g2, batch, place, name)?;
            to.g2.check(batch, seed)?;
            Ok(format!("{write} {read}"))
        }
        other => Err(format!("{other} is no ask").into()),
    })
}
