// SPDX-License-Identifier: Apache-2.0
//! Every operation of `Native`, of the lines and of the copies above it, as the instructions that really reach the pool: each that orders
//! or moves something is needed, and the checker notices when it is left out.

#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges of bytes, some of one")]

use crate::native::{native, variants};
use crate::order::{Demands, check, check_line_write, lines_of};
use crate::recorder::{Event, Step, record};
use crate::support::pattern;
use cxl_pool::coherence::*;
use cxl_pool::copy::{Checksum, CopyConfig, CopyEngine, CpuEngine, ReadList, WriteList};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::{Line, Lines};
use cxl_pool::media::{Geometry, Layout, Region, StatsLine};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// The watched part of the pool: where the lines of a region begin.
const WINDOW_BYTES: usize = 64 << 10;
const PAGE_BYTES: u64 = 4096;
/// As the lines of a pool are found.
const LAYOUT_BYTES: u64 = 64 << 20;

/// A pool, its lines, and how it is reached.
struct Bench {
    memory: Arc<dyn Coherence>,
    lines: Lines,
    engine: CpuEngine,
    start: u64,
    window: *mut u8,
    is_coherent: bool,
}

impl Bench {
    fn new((instructions, hardware): (Instructions, bool)) -> Bench {
        let layout = Layout::new(Geometry::with_len(LAYOUT_BYTES)).unwrap();
        // Whole pages are watched; the first lines of the region lie in them.
        let start = layout.span(Region::Stats).offset / PAGE_BYTES * PAGE_BYTES;
        let memory: Arc<dyn Coherence> = Arc::new(native(instructions, hardware, start + WINDOW_BYTES as u64));
        let window = memory.address(start, WINDOW_BYTES as u64).unwrap().as_ptr();
        // A window of the smallest size, so that short pulls have several.
        let copy = CopyConfig { workers: 0, window_bytes: 4096, stream_from_bytes: 4096, ..CopyConfig::alone() };
        let lines = Lines::new(memory.clone(), Arc::new(layout), &[7; 16], 9);
        Bench { lines, engine: CpuEngine::new(copy), memory, start, window, is_coherent: hardware }
    }

    fn demands(&self) -> Demands {
        Demands { is_coherent: self.is_coherent, ..Demands::default() }
    }

    fn before(&self) -> Vec<u8> {
        pattern(1, WINDOW_BYTES)
    }

    fn contents(&self) -> Vec<u8> {
        // SAFETY: the window, which nothing else touches.
        unsafe { std::slice::from_raw_parts(self.window, WINDOW_BYTES) }.to_vec()
    }
}

/// What is recorded: it may not allocate much, because string instructions trap at each byte.
type Act<'a> = Box<dyn Fn(&Bench, &mut [u8]) + 'a>;

/// One operation with the fence that its recipe ends with, and what it must do.
struct Case<'a> {
    name: String,
    demands: Demands,
    /// What the window holds before and after; the same where nothing is stored.
    before: Vec<u8>,
    after: Vec<u8>,
    /// What the operation gives.
    given: Vec<u8>,
    /// Lines that are metadata, written as one unit.
    units: Vec<usize>,
    act: Act<'a>,
}

impl<'a> Case<'a> {
    fn new(name: impl Into<String>, bench: &Bench, demands: Demands, act: impl Fn(&Bench, &mut [u8]) + 'a) -> Case<'a> {
        let (before, name) = (bench.before(), name.into());
        Case { name, demands, after: before.clone(), before, given: vec![], units: vec![], act: Box::new(act) }
    }

    fn gives(self, given: impl Into<Vec<u8>>) -> Self {
        Case { given: given.into(), ..self }
    }

    fn stores(mut self, at: usize, bytes: &[u8]) -> Self {
        self.after[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Runs it without the instruction `skipped`, and judges.
    fn run(&self, bench: &Bench, skipped: Option<usize>) -> (Vec<Event>, Result<(), String>) {
        // SAFETY: the window, which nothing else touches.
        unsafe { std::ptr::copy_nonoverlapping(self.before.as_ptr(), bench.window, WINDOW_BYTES) };
        let mut given = vec![0; self.given.len()];
        let ((), events) = record((bench.window, WINDOW_BYTES), skipped, || (self.act)(bench, &mut given));
        let units = self.units.iter().map(|&line| check_line_write(&events, line, &self.after[line * LINE_BYTES..]));
        let judged = check(&events, &self.demands).and_then(|()| units.collect()).and_then(|()| match () {
            () if given != self.given => Err("it gives other bytes".into()),
            () if bench.contents() != self.after => Err("the pool holds other bytes".into()),
            () => Ok(()),
        });
        (events, judged)
    }

    fn must_hold(&self, bench: &Bench) -> Vec<Event> {
        let (events, judged) = self.run(bench, None);
        let listed: Vec<String> = events.iter().take(60).map(|event| format!("{:?} {:#x}", event.step, event.at)).collect();
        assert_eq!(judged, Ok(()), "{} over {}: {}", self.name, bench.memory_name(), listed.join(", "));
        events
    }

    /// Every instruction alone is needed, and so is the place of every fence.
    fn must_need_each(&self, bench: &Bench) -> usize {
        let events = self.must_hold(bench);
        // Ordinary stores stay in order by themselves: only flushes and stores past the caches need the store fence.
        let is_ordered = self.demands.is_coherent && !events.iter().any(|event| matches!(event.step, Step::Past(_)));
        // The C library stores some bytes of short copies twice: only the words of a line are counted.
        let is_needed = |event: &Event| match event.step {
            Step::StoreFence => !is_ordered,
            Step::Store => !self.units.is_empty(),
            _ => true,
        };
        let numbered: Vec<&Event> = events.iter().filter(|event| event.number.is_some() && is_needed(event)).collect();
        for event in &numbered {
            let (_, judged) = self.run(bench, event.number);
            assert!(judged.is_err(), "{} over {}: nothing notices the loss of {event:?}", self.name, bench.memory_name());
        }
        for place in (0..events.len()).filter(|&place| events[place].step.is_fence() && is_needed(&events[place])) {
            for moved in moves(&events, place) {
                let judged = check(&moved, &self.demands);
                assert!(judged.is_err(), "{} over {}: nothing notices fence {place} moved", self.name, bench.memory_name());
            }
        }
        numbered.len()
    }
}

impl Bench {
    fn memory_name(&self) -> &'static str {
        if self.is_coherent { "coherent memory" } else { "memory without coherence" }
    }
}

/// The events with the fence at `place` in front of the instructions that it orders, and behind the first that waits for it.
fn moves(events: &[Event], place: usize) -> Vec<Vec<Event>> {
    let orders = |event: &Event| match events[place].step {
        Step::LoadFence => event.step == Step::Load,
        _ => !event.step.is_fence() && event.step != Step::Load,
    };
    let moved = |to: usize| {
        let mut events = events.to_vec();
        let fence = events.remove(place);
        events.insert(to, fence);
        events
    };
    let last = (0..place).rev().find(|&at| orders(&events[at]));
    let earlier = last.map(|last| (0..last).rev().take_while(|&at| orders(&events[at])).last().unwrap_or(last)).map(moved);
    let later = (place + 1..events.len()).find(|&at| matches!(events[at].step, Step::Load | Step::Store)).map(moved);
    earlier.into_iter().chain(later).collect()
}

/// What every recipe of the lines does.
fn line_cases<'a>(bench: &Bench, instructions: Instructions, all: bool) -> Vec<Case<'a>> {
    let by_words = !matches!(instructions.write, LineWrite::Movdir64b | LineWrite::Avx512);
    let value_of =
        |number: u32| StatsLine { incarnation: number, counters: [0x0101_0101_0101_0101 * u64::from(number); 7], ..StatsLine::default() };
    let written = |demands: Demands, line: usize| {
        let demands = Demands { stores: [demands.stores, vec![line * LINE_BYTES..(line + 1) * LINE_BYTES]].concat(), ..demands };
        if by_words { demands.flush([line]) } else { demands }
    };
    let fetched = |lines: &[usize]| {
        let all = bench.demands().flush(lines.iter().copied());
        lines.iter().fold(all, |demands, line| demands.load(line * LINE_BYTES..(line + 1) * LINE_BYTES))
    };
    let content = bench.before();
    let in_window =
        |lines: &[usize]| -> Vec<u8> { lines.iter().flat_map(|line| content[line * LINE_BYTES..][..LINE_BYTES].to_vec()).collect() };

    // The place of the region's first line in the window.
    let span = bench.lines.layout().span(Region::Stats);
    let first_line = ((span.offset - bench.start) / LINE_BYTES as u64) as usize;
    let mut cases = Vec::new();
    for number in [5u64, 0].into_iter().take(1 + usize::from(all)) {
        let line = first_line + number as usize;
        let value = value_of(number as u32 + 3);
        let sealed = bench.lines.seal(number, value).0;
        let mut case =
            Case::new(format!("publish of line {line}"), bench, written(bench.demands(), line), move |bench: &Bench, _: &mut [u8]| {
                bench.lines.publish(number, value).unwrap();
            });
        case.units = vec![line];
        cases.push(case.stores(line * LINE_BYTES, &sealed));

        let mut case = Case::new(format!("fetch of line {line}"), bench, fetched(&[line]), move |bench: &Bench, out: &mut [u8]| {
            out.copy_from_slice(bytemuck::bytes_of(&bench.lines.fetch::<StatsLine>(number).unwrap()));
        });
        case.before[line * LINE_BYTES..(line + 1) * LINE_BYTES].copy_from_slice(&sealed);
        case.after = case.before.clone();
        cases.push(case.gives(sealed));

        let start = bench.start + (line * LINE_BYTES) as u64;
        let raw = Case::new(format!("raw fetch of line {line}"), bench, fetched(&[line]), move |bench: &Bench, out: &mut [u8]| {
            out.copy_from_slice(&bench.lines.fetch_raw(start).unwrap().0);
        });
        cases.push(raw.gives(in_window(&[line])));
    }
    let (first, second) = (value_of(8), value_of(9));
    let sealed = [bench.lines.seal(2, first).0, bench.lines.seal(3, second).0];
    let mut case = Case::new(
        "two lines behind one fence",
        bench,
        written(written(bench.demands(), first_line + 2), first_line + 3),
        move |bench: &Bench, _: &mut [u8]| {
            bench.lines.write(2, first).unwrap();
            bench.lines.write(3, second).unwrap();
            bench.lines.fence_published();
        },
    );
    case.units = vec![first_line + 2, first_line + 3];
    cases.push(case.stores((first_line + 2) * LINE_BYTES, sealed.as_flattened()));
    if !all {
        return cases;
    }
    for wanted in [vec![3, 1, 2], (0..70).rev().collect(), vec![1023, 0, 511]] {
        let offsets: Vec<u64> = wanted.iter().map(|line| bench.start + (line * LINE_BYTES) as u64).collect();
        let many = Case::new(format!("fetch of {} lines", wanted.len()), bench, fetched(&wanted), move |bench: &Bench, out: &mut [u8]| {
            let mut found = [Line::ZERO; 70];
            bench.lines.fetch_raw_many(offsets.iter().copied(), &mut found[..offsets.len()]).unwrap();
            out.chunks_mut(LINE_BYTES).zip(&found).for_each(|(out, line)| out.copy_from_slice(&line.0));
        });
        cases.push(many.gives(in_window(&wanted)));
    }
    let mut case =
        Case::new("fetch of lines of a region", bench, fetched(&[first_line + 4, first_line + 2]), |bench: &Bench, out: &mut [u8]| {
            let mut found = vec![];
            bench.lines.fetch_many::<StatsLine>(&[4, 2], &mut found).unwrap();
            out.chunks_mut(LINE_BYTES).zip(&found).for_each(|(out, line)| out.copy_from_slice(bytemuck::bytes_of(line.as_ref().unwrap())));
        });
    let sealed = [bench.lines.seal(4, first).0, bench.lines.seal(2, second).0];
    for (line, content) in [first_line + 4, first_line + 2].into_iter().zip(sealed) {
        case.before[line * LINE_BYTES..(line + 1) * LINE_BYTES].copy_from_slice(&content);
    }
    case.after = case.before.clone();
    cases.push(case.gives(sealed.as_flattened()));
    // No load, no flush and no store: nothing that anything could be ordered against.
    cases.push(Case::new("prefetch of lines", bench, bench.demands(), |bench: &Bench, _: &mut [u8]| {
        bench.memory.prefetch_lines(&[bench.start, bench.start + 4096]).unwrap()
    }));
    // What a sibling may have left in a cache of this host is brought out: here, a store that the operation itself does not make.
    cases.push(Case::new("settled", bench, bench.demands().flush([first_line + 6]).complete(), |bench: &Bench, _: &mut [u8]| {
        bench.lines.settle::<StatsLine>(6).unwrap()
    }));
    cases
}

fn range_cases<'a>(bench: &Bench, ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Case<'a>> {
    let mut cases = Vec::new();
    for (number, range) in ranges.into_iter().enumerate() {
        let (at, len) = (bench.start + range.start as u64, range.len());
        let source: Vec<u8> = pattern(100 + number as u64, len + 64);
        let skew = number * 7 % 64;
        let named = |what: &str| format!("{what} of {len} bytes at {}", range.start);

        let written = source[skew..skew + len].to_vec();
        let expected = written.clone();
        let case = Case::new(named("copy in"), bench, bench.demands().store(range.clone()), move |bench: &Bench, _: &mut [u8]| {
            bench.memory.copy_in(at, &written).unwrap();
            bench.memory.fence_stores();
        });
        cases.push(case.stores(range.start, &expected));

        let demands = bench.demands().flush(lines_of(&range)).load(range.clone()).complete();
        // The destination is unaligned as well.
        let given: Vec<u8> = [&vec![0; skew], &bench.before()[range.clone()]].concat();
        for streams in [false, true] {
            let case = Case::new(
                named(if streams { "streaming copy out" } else { "copy out" }),
                bench,
                demands.clone(),
                move |bench: &Bench, out: &mut [u8]| {
                    bench.memory.flush_range(at, len as u64).unwrap();
                    bench.memory.fence_all();
                    match streams {
                        true => bench.memory.copy_out_streaming(at, &mut out[skew..]).unwrap(),
                        false => bench.memory.copy_out(at, &mut out[skew..]).unwrap(),
                    }
                    bench.memory.fence_all();
                },
            );
            cases.push(case.gives(given.clone()));
        }
    }
    cases
}

/// Lists as a cache moves them: gathered, scattered, sparse, with tails, and longer than a flush window.
fn list_cases<'a>(bench: &Bench) -> Vec<Case<'a>> {
    let (start, mut cases) = (bench.start, Vec::new());
    let lists: [(&str, Vec<Range<usize>>); 6] = [
        ("one line", vec![64..128]),
        ("one after the other", vec![128..1500, 1500..4000, 4000..4001]),
        ("sparse, no line twice", vec![9000..9100, 130..200, 4096..4300, 300..301]),
        ("sparse, with a whole window", vec![9000..9100, 130..200, 4096..8192]),
        ("three windows", vec![4096..4096 + 3 * 4096]),
        ("windows that begin inside lines", vec![40..4140, 8200..13_000]),
    ];
    for (name, ranges) in lists {
        let total: usize = ranges.iter().map(Range::len).sum();
        let source = pattern(50 + total as u64, total);
        // Neighbours are put together before they are stored.
        let joined: Vec<Range<usize>> = ranges.iter().fold(Vec::new(), |mut joined: Vec<Range<usize>>, range| {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range.clone()),
            }
            joined
        });
        let demands = joined.iter().fold(bench.demands(), |demands, range| demands.store(range.clone()));
        let (places, bytes) = (ranges.clone(), source.clone());
        let mut case = Case::new(format!("publish, {name}"), bench, demands, move |bench: &Bench, _: &mut [u8]| {
            let (mut list, mut rest) = (WriteList::new(), &bytes[..]);
            for range in &places {
                let (now, behind) = rest.split_at(range.len());
                list.push(start + range.start as u64, now);
                rest = behind;
            }
            bench.engine.publish(&*bench.memory, &list, Checksum::Off).unwrap();
        });
        let mut rest = &source[..];
        for range in &ranges {
            let (now, behind) = rest.split_at(range.len());
            (case, rest) = (case.stores(range.start, now), behind);
        }
        cases.push(case);

        let before = bench.before();
        let given: Vec<u8> = ranges.iter().flat_map(|range| before[range.clone()].to_vec()).collect();
        let mut demands = bench.demands();
        for part in parts_of_windows(&ranges) {
            demands = demands.flush(lines_of(&part)).load(part);
        }
        let places = ranges.clone();
        let case = Case::new(format!("pull, {name}"), bench, demands, move |bench: &Bench, out: &mut [u8]| {
            let (mut list, mut rest) = (ReadList::new(), out);
            for range in &places {
                let (now, behind) = std::mem::take(&mut rest).split_at_mut(range.len());
                list.push(start + range.start as u64, now);
                rest = behind;
            }
            bench.engine.pull(&*bench.memory, &mut list, Checksum::Off).unwrap();
        });
        cases.push(case.gives(given));
    }
    cases
}

/// What a pull flushes at once: windows of 4096 bytes, neighbours inside one together.
fn parts_of_windows(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut parts, mut left): (Vec<Range<usize>>, usize) = (vec![], 4096);
    let mut joins = false;
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            let taken = left.min(range.end - at);
            match parts.last_mut() {
                Some(last) if joins && last.start <= at && at <= last.end.next_multiple_of(LINE_BYTES) => last.end = at + taken,
                _ => parts.push(at..at + taken),
            }
            (at, left, joins) = (at + taken, left - taken, true);
            if left == 0 {
                (left, joins) = (4096, false);
            }
        }
    }
    parts
}

/// Lists up to this length are tried without each of their instructions.
const FEW_EVENTS: usize = 40;

#[test]
fn every_flush_fence_and_store_past_the_caches_is_needed() {
    let (best, mut tried, mut known) = (Instructions::best().unwrap(), 0, HashSet::new());
    // Memory that is coherent by itself leaves out what the flags say, whatever the instruction: tried with the best.
    for variant in variants().into_iter().filter(|variant| known.insert(*variant) && (!variant.1 || variant.0 == best)) {
        let bench = Bench::new(variant);
        // What a choice has no part in is tried once, with the best of each.
        let (is_best, copies) = (variant.0 == best, variant.0.copy != best.copy || variant.0.range != best.range);
        let mut cases = if is_best || !copies { line_cases(&bench, variant.0, is_best) } else { vec![] };
        if is_best || copies {
            cases.extend(range_cases(&bench, [100..330]));
        }
        if is_best {
            cases.extend(range_cases(&bench, [60..70, 128..192]));
            cases.extend(list_cases(&bench));
        }
        for case in cases {
            tried += match case.must_hold(&bench).len() <= FEW_EVENTS {
                true => case.must_need_each(&bench),
                false => 0,
            };
        }
    }
    println!("{tried} instructions were left out, and each was missed");
    assert!(tried > 200, "{tried}");
}

#[test]
fn ranges_of_every_alignment_and_length_flush_and_store_exactly_their_lines() {
    let lengths = [0, 1, 2, 7, 8, 15, 31, 33, 63, 64, 65, 127, 128, 129, 191, 200, 256, 257];
    let bench = Bench::new((Instructions::best().unwrap(), false));
    let of_skew = |skew: usize| [lengths[skew % lengths.len()], lengths[(skew * 7 + 5) % lengths.len()]];
    let ranges = (0..64).flat_map(|skew| of_skew(skew).map(|len| 4096 - 64 + skew..4096 - 64 + skew + len));
    for case in range_cases(&bench, ranges) {
        case.must_hold(&bench);
    }
}

#[test]
fn long_copies_store_every_line_once_past_the_caches() {
    let bench = Bench::new((Instructions::best().unwrap(), false));
    for case in range_cases(&bench, [64..64 + 530 * LINE_BYTES + 5]) {
        let events = case.must_hold(&bench);
        if let [bytes] = &case.demands.stores[..] {
            let past: usize = events.iter().map(|event| if let Step::Past(len) = event.step { len } else { 0 }).sum();
            assert_eq!(past, bytes.len() / LINE_BYTES * LINE_BYTES, "{}", case.name);
        }
    }
}
