// SPDX-License-Identifier: Apache-2.0
//! Calls between two processes that are two hosts: request and response of 64 bytes, from one to 128 calls under way (Beluga Exp #11).
//!
//! Baseline: the transfer of one bare line. Two processes send a line back and forth by publish (non-temporal store, SFENCE) and fetch
//! (CLFLUSH, MFENCE, load); half of a round is one transfer. A round trip of a call carries four lines, since requests and responses of 64
//! bytes with their numbers and checksums take two each: it should cost no more than four transfers.
//!
//! Second baseline, with `--ucx`: the same calls by active messages of UCX between two processes (perf/ucx_calls.c), over shared memory and
//! over tcp. Every response is compared with its request. While one of the three is measured, the others rest.

use crate::lab::{Lab, instructions, join_host, open, wrong};
use crate::report::Bench;
use crate::ucx;
use ctl_common::peer::Peer;
use ctl_common::stats::{Estimate, median};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::coherence::{Bare, Coherence};
use cxl_pool::host::Host;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use cxl_pool::ring::rpc::{Client, Server};
use cxl_pool::ring::{Connection, RingConfig, Rings};
use cxl_pool::{Error, Result};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MESSAGE_BYTES: usize = 64;
const DEPTHS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Calls of one batch at depth 1, and at greater depths.
const BATCH: u64 = 256;
const DEEP_BATCH: u64 = 4096;
/// Hand-overs of the bare line in one batch.
const BARE: u64 = 256;
/// Deadline of everything, in milliseconds.
const TIMEOUT_MS: u64 = 30_000;
/// Names of the calls' listener and of the bare lines.
const NAME: &[u8] = b"bench";
const LINES: &[u8] = b"bench lines";
/// A request that starts a round of the bare line, one that ends the second process, and one after which it sleeps between polls: it shares
/// a CPU with one of UCX's processes.
const TURN: u8 = 1;
const END: u8 = 2;
const REST: u8 = 3;
/// Between two polls of a process that rests.
const REST_TIME: Duration = Duration::from_millis(1);
/// UCX transports, each with the names of the ratios of our round-trip time and rate to its.
const UCX: [(&str, &str, &str); 2] =
    [("shm", "rpc_rtt_vs_ucx", "rpc_rate_128_vs_ucx"), ("tcp", "rpc_rtt_vs_ucx_tcp", "rpc_rate_128_vs_ucx_tcp")];
/// The depth at which rates are compared with UCX's.
const MOST: usize = DEPTHS[DEPTHS.len() - 1];

type UnderWay = HashMap<cxl_pool::ring::rpc::CallId, (u64, Instant), BuildHasherDefault<DefaultHasher>>;

/// Binds this thread to the CPU `number`, from 0, of those that this process may use, if there are so many.
fn pin(number: usize) {
    let mut allowed = [0u64; 16];
    let len_bytes = size_of_val(&allowed);
    // SAFETY: the mask is writable and as long as said.
    if unsafe { libc::sched_getaffinity(0, len_bytes, allowed.as_mut_ptr().cast()) } <= 0 {
        return;
    }
    let mut cpus = (0..allowed.len() * 64).filter(|cpu| allowed[cpu / 64] >> (cpu % 64) & 1 != 0);
    if let Some(cpu) = cpus.nth(number) {
        let mut mask = [0u64; 16];
        mask[cpu / 64] = 1 << (cpu % 64);
        // SAFETY: the mask is readable and as long as said. Where it is refused the figures are those of a thread that moves.
        unsafe { libc::sched_setaffinity(0, len_bytes, mask.as_ptr().cast()) };
    }
}

/// The allocator and the rings of a process of the bench.
fn parts(host: &Host) -> Result<(Arc<Allocator>, Rings)> {
    let allocator = Arc::new(Allocator::attach(host, LocalArea::of(host)?, AllocConfig::default())?);
    let rings = Rings::new(host, allocator.clone(), RingConfig { peer_timeout_ms: 10_000, ..RingConfig::default() })?;
    Ok((allocator, rings))
}

/// Sends the bare line back and forth. `own` is the line that this process writes, of two.
fn exchange(bare: &Bare, own: u64, first: u64, rounds: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_millis(TIMEOUT_MS);
    for number in first..first + rounds {
        if own == 0 {
            bare.publish(0, &line_of(number));
        }
        let mut polls = 0u32;
        while bare.fetch(1 - own) != line_of(number) {
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(64) {
                std::thread::yield_now();
            }
            if polls.is_multiple_of(1 << 16) && Instant::now() > end {
                return Err(wrong("the bare line did not come back"));
            }
        }
        if own == 1 {
            bare.publish(1, &line_of(number));
        }
    }
    Ok(())
}

fn line_of(number: u64) -> Line {
    bytemuck::cast([0, 1, 2, 3, 4, 5, 6, 7].map(|word: u64| (number * 8 + word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Request `number`; its first byte says what it asks for.
fn request(number: u64) -> [u8; MESSAGE_BYTES] {
    let Line(mut bytes) = line_of(number);
    bytes[0] = 0;
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The response to a request: every byte differs.
fn respond(request: &[u8], response: &mut Vec<u8>) {
    response.extend(request.iter().map(|byte| !byte));
}

fn bare_lines(memory: Arc<dyn Coherence>, offset: u64) -> Result<Bare> {
    Bare::over(memory, offset, 2, instructions()?)
}

/// The second process: it answers.
pub fn peer(pool: &Path, state: &Path) -> Result<()> {
    let pool = open(pool)?;
    let (host, service) = join_host(&pool, state, 1)?;
    let objects = cxl_pool::objects::Objects::new(&host);
    let bare = bare_lines(pool.lines().memory().clone(), objects.get(LINES, TIMEOUT_MS)?.offset)?;
    let (_allocator, rings) = parts(&host)?;
    pin(1);
    answer(&bare, rings.connect(NAME, TIMEOUT_MS)?)?;
    drop(rings);
    host.leave()?;
    drop(service);
    Ok(())
}

fn answer(bare: &Bare, connection: Connection) -> Result<()> {
    let mut server = Server::new(connection);
    let mut rounds = 0;
    let mut idle = 0u32;
    let mut is_resting = false;
    loop {
        let mut asked = 0;
        let served = server.serve(MOST, TIMEOUT_MS, |request, response| {
            asked = request.first().copied().unwrap_or(0);
            respond(request, response);
            0
        })?;
        match asked {
            TURN => {
                exchange(bare, 1, rounds, BARE)?;
                rounds += BARE;
            }
            END => {
                // The other end closes first.
                let ended = server.serve(1, TIMEOUT_MS, |_, _| 0);
                return match ended {
                    Ok(_) | Err(Error::PeerClosed { .. } | Error::PeerGone { .. }) => Ok(()),
                    Err(error) => Err(error),
                };
            }
            _ => {}
        }
        if served > 0 {
            is_resting = asked == REST;
        }
        idle = if served == 0 { idle.wrapping_add(1) } else { 0 };
        match served {
            0 if is_resting => std::thread::sleep(REST_TIME),
            0 if idle.is_multiple_of(64) => std::thread::yield_now(),
            _ => {}
        }
    }
}

/// What the batches took, in nanoseconds.
#[derive(Default)]
struct CallTimes {
    /// One call at a time, each batch's median; and a round of the bare line, measured next to it.
    rtt: Vec<f64>,
    bare_round: Vec<f64>,
    /// Each batch's time per call, by depth.
    per_call: [Vec<f64>; DEPTHS.len()],
    /// By way of UCX: pairs of its time and ours, one call at a time, and with the most under way.
    ucx: [[Vec<(f64, f64)>; 2]; UCX.len()],
}

/// Measures; also UCX, where `ucx` is the command that makes its calls.
pub fn run(batches: u64, ucx: Option<&str>) -> Result<Bench> {
    let ways = || UCX.iter().map(|(way, ..)| *way);
    let mut others = match ucx {
        Some(command) => ways().map(|way| ucx::Peer::start(&format!("{command} {way}"))).collect::<Result<Vec<_>>>()?,
        None => Vec::new(),
    };
    let lab = Lab::new(0, 0, 0)?;
    let (host, service) = join_host(&lab.pool, &lab.state(), 0)?;
    let (allocator, rings) = parts(&host)?;
    let lines = allocator.alloc(2 * LINE_BYTES as u64)?;
    let memory = lab.memory().clone();
    memory.write_line(lines.offset, &Line::ZERO)?;
    memory.write_line(lines.offset + LINE_BYTES as u64, &Line::ZERO)?;
    memory.fence_all();
    cxl_pool::objects::Objects::new(&host).put(LINES, lines.offset, 2 * LINE_BYTES as u64, TIMEOUT_MS)?;
    let bare = bare_lines(memory, lines.offset)?;
    let mut listener = rings.listen(NAME)?;
    let other = Peer::start(&[&["peer".into(), "rpc".into()][..], &lab.arguments()].concat(), &[])?;
    let mut client = Client::new(listener.accept(TIMEOUT_MS)?, MOST)?;
    pin(0);
    let taken = measure(&mut client, &bare, batches, &mut others)?;
    client.call(&[END; MESSAGE_BYTES], &mut Vec::new(), TIMEOUT_MS)?;
    drop(client);
    other.answer::<()>(Duration::from_millis(TIMEOUT_MS))?;
    listener.close()?;
    allocator.free(lines.offset)?;
    let used = allocator.usage().scratch_bytes;
    if used != 0 {
        return Err(wrong(format!("{used} bytes of the connection were not given back")));
    }
    drop(rings);
    host.leave()?;
    drop(service);
    let mut bench = report(taken, lab.pool.description());
    bench.notes.extend(others.iter().map(|other| format!("Compared with UCX {}.", other.description())));
    Ok(bench)
}

fn measure(client: &mut Client, bare: &Bare, batches: u64, others: &mut [ucx::Peer]) -> Result<CallTimes> {
    let mut taken = CallTimes::default();
    let (mut rounds, mut number) = (0, 0);
    for batch in 0..batches {
        client.call(&[TURN; MESSAGE_BYTES], &mut Vec::new(), TIMEOUT_MS)?;
        let mut round_ns = Vec::with_capacity(BARE as usize);
        for _ in 0..BARE {
            let start = Instant::now();
            exchange(bare, 0, rounds, 1)?;
            round_ns.push(start.elapsed().as_nanos() as f64);
            rounds += 1;
        }
        taken.bare_round.push(median(&mut round_ns));
        for (&depth, per_call) in DEPTHS.iter().zip(&mut taken.per_call) {
            // Depth 1 is compared with the bare line in every batch; the others take longer and matter less.
            if depth > 1 && batch % 8 != 0 {
                continue;
            }
            let calls = if depth == 1 { BATCH } else { DEEP_BATCH };
            let start = Instant::now();
            let mut latency = call_many(client, depth, number, calls)?;
            per_call.push(start.elapsed().as_nanos() as f64 / calls as f64);
            number += calls;
            if depth == 1 {
                // The median, as of the bare line: a mean would count the time of other programs.
                taken.rtt.push(median(&mut latency));
            }
        }
        if batch % 8 == 0 && !others.is_empty() {
            let last = |times: &[f64]| times.last().copied().unwrap_or(f64::NAN);
            let ours = [last(&taken.rtt), last(&taken.per_call[DEPTHS.len() - 1])];
            compare(client, others, ours, &mut taken.ucx)?;
        }
    }
    Ok(taken)
}

/// Pairs one batch of each way of UCX, one call at a time and with the most under way, with what ours have just taken.
fn compare(client: &mut Client, others: &mut [ucx::Peer], ours: [f64; 2], pairs: &mut [[Vec<(f64, f64)>; 2]; UCX.len()]) -> Result<()> {
    client.call(&[REST; MESSAGE_BYTES], &mut Vec::new(), TIMEOUT_MS)?;
    for (other, [rtt, deep]) in others.iter_mut().zip(pairs) {
        let mut times = other.request(&format!("calls 1 {BATCH}"))?;
        rtt.push((median(times.get_mut(1..).unwrap_or_default()), ours[0]));
        let times = other.request(&format!("calls {MOST} {DEEP_BATCH}"))?;
        deep.push((times.first().copied().unwrap_or(f64::NAN), ours[1]));
    }
    Ok(())
}

/// Makes calls with requests `first` to `first + calls - 1`, `depth` under way at a time. Their latencies, in nanoseconds.
fn call_many(client: &mut Client, depth: usize, first: u64, calls: u64) -> Result<Vec<f64>> {
    let mut latency = Vec::with_capacity(calls as usize);
    let mut under_way = UnderWay::default();
    let (mut begun, mut done, mut response, mut expected) = (0, 0, Vec::new(), Vec::new());
    let mut idle = 0u32;
    while done < calls {
        while begun < calls && under_way.len() < depth {
            let now = Instant::now();
            under_way.insert(client.submit(&request(first + begun), TIMEOUT_MS)?, (first + begun, now));
            begun += 1;
        }
        client.flush();
        let before = done;
        while let Some(completion) = client.poll(&mut response)? {
            let Some((number, since)) = under_way.remove(&completion.call) else { return Err(wrong("a call was done twice")) };
            latency.push(since.elapsed().as_nanos() as f64);
            expected.clear();
            respond(&request(number), &mut expected);
            if completion.status? != 0 || response != expected {
                return Err(wrong(format!("the response to call {number} is not that of its request")));
            }
            done += 1;
        }
        idle = if done == before { idle.wrapping_add(1) } else { 0 };
        if idle % 64 == 63 {
            std::thread::yield_now();
        }
    }
    Ok(latency)
}

fn report(taken: CallTimes, title: &str) -> Bench {
    let mut bench = Bench::new(format!("calls between two processes, {title}"));
    let four: Vec<f64> = taken.bare_round.iter().map(|round| 2.0 * round).collect();
    bench.figure("transfer of one bare line, publish to fetch", median(&mut taken.bare_round.clone()) / 2.0, "ns");
    bench.time("round trip of a call, 64 bytes each way", &taken.rtt);
    let rates = taken.per_call.map(|mut per_call| 1e9 / median(&mut per_call));
    for (depth, rate) in DEPTHS.iter().zip(rates) {
        bench.figure(format!("calls per second, {depth} under way"), rate, "");
    }
    bench.at_most("rpc_rtt_vs_4_transfers", Estimate::of_ratios(&taken.rtt, &four), 1.0);
    bench.ratio("rpc_rtt_vs_bare_round_trip", Estimate::of_ratios(&taken.rtt, &taken.bare_round));
    let gain = |rate: f64| Estimate::of(vec![rate / rates[0]]);
    bench.ratio("rpc_rate_128_over_1", gain(rates[DEPTHS.len() - 1]));
    bench.ratio("rpc_rate_best_over_1", gain(rates.into_iter().fold(0.0, f64::max)));
    for ((way, rtt_name, rate_name), [rtt, deep]) in UCX.iter().zip(taken.ucx).filter(|(_, [rtt, _])| !rtt.is_empty()) {
        let [(ucx_rtt, our_rtt), (mut ucx_deep, our_deep)] = [rtt, deep].map(|pairs| pairs.into_iter().unzip::<_, _, Vec<_>, Vec<_>>());
        bench.ratio(rtt_name, Estimate::of_ratios(&ucx_rtt, &our_rtt));
        bench.ratio(rate_name, Estimate::of_ratios(&ucx_deep, &our_deep));
        bench.time(format!("round trip of an active message of UCX and its answer, {way}"), &ucx_rtt);
        bench.figure(format!("such calls per second, {MOST} under way, {way}"), 1e9 / median(&mut ucx_deep), "");
    }
    bench
}
