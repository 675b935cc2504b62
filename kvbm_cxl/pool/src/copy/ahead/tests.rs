// SPDX-License-Identifier: Apache-2.0
use super::depth::Depth;
use super::*;
use crate::coherence::Line;
use crate::copy::{After, CpuEngine, LocalPlace, LocalRange, OnGpu};
use crate::error::Error;
use crate::limits::LINE_BYTES;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::time::Duration;

const PAGE: u64 = 4096;
/// A block: eight pages, of which the second and later begin a page.
const BLOCK: u64 = 8 * PAGE;

/// Memory that notes in which order its pages get hints and are copied.
#[derive(Default)]
struct Noting {
    bytes: Vec<u8>,
    /// Lines that were flushed, and those of them that were fenced since.
    flushed: Mutex<HashSet<u64>>,
    gone: Mutex<HashSet<u64>>,
    /// Lines that got a hint while this host may still have had them in a cache.
    kept: Mutex<Vec<u64>>,
    /// Names of the threads that told.
    tellers: Mutex<HashSet<Option<String>>>,
    /// Telling takes until this is free.
    busy: Mutex<()>,
    /// (page, whether it was copied).
    steps: Mutex<Vec<(u64, bool)>>,
    /// A copy of this page fails.
    bad_page: Option<u64>,
    /// A copy takes as long, so that the thread that asks comes to its turn.
    pause: Duration,
    is_mapped: bool,
}

impl Noting {
    fn new(blocks: u64, is_mapped: bool) -> Noting {
        let bytes = (0..blocks * BLOCK).map(|at| (at / 7 + at / PAGE) as u8).collect();
        let pause = if is_mapped { Duration::from_millis(20) } else { Duration::ZERO };
        Noting { bytes, pause, is_mapped, ..Noting::default() }
    }

    /// At which of all steps something first happened to a page.
    fn first(&self, page: u64, is_copied: bool) -> Option<usize> {
        held(&self.steps).iter().position(|step| *step == (page, is_copied))
    }
}

impl Coherence for Noting {
    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn load_line(&self, _offset: u64) -> Result<Line> {
        Ok(Line::ZERO)
    }

    fn write_line(&self, _offset: u64, _line: &Line) -> Result<()> {
        Ok(())
    }

    fn flush_line(&self, _offset: u64) -> Result<()> {
        Ok(())
    }

    fn fence_stores(&self) {}

    fn fence_all(&self) {
        held(&self.gone).extend(held(&self.flushed).drain());
    }

    fn fence_loads(&self) {}

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        held(&self.flushed).extend((offset..offset + len_bytes).step_by(LINE_BYTES));
        Ok(())
    }

    fn prefetch_lines(&self, offsets: &[u64]) -> Result<()> {
        drop(held(&self.busy));
        held(&self.tellers).insert(std::thread::current().name().map(String::from));
        let mut gone = held(&self.gone);
        held(&self.kept).extend(offsets.iter().filter(|offset| !gone.remove(offset)));
        held(&self.steps).extend(offsets.iter().map(|offset| (offset / PAGE, false)));
        Ok(())
    }

    fn copy_in(&self, _offset: u64, _source: &[u8]) -> Result<()> {
        Ok(())
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        let pages = offset / PAGE..(offset + destination.len() as u64).div_ceil(PAGE);
        if self.bad_page.is_some_and(|bad| pages.contains(&bad)) {
            return Err(Error::Poisoned { offset, len_bytes: destination.len() as u64 });
        }
        std::thread::sleep(self.pause);
        held(&self.steps).extend(pages.map(|page| (page, true)));
        destination.copy_from_slice(&self.bytes[offset as usize..][..destination.len()]);
        Ok(())
    }

    fn address(&self, offset: u64, _len_bytes: u64) -> Option<NonNull<u8>> {
        // Only whether there is one counts here.
        self.is_mapped.then(|| NonNull::from(&self.bytes[offset as usize]))
    }
}

fn over(memory: &Arc<Noting>, ahead: &str) -> Arc<dyn CopyEngine> {
    let config = format!("engine=cpu,workers=0,{ahead}").parse().unwrap();
    AheadEngine::over(Arc::new(CpuEngine::new(config)), memory.clone(), &config, None)
}

/// Pulls blocks in this order, each to a place of its own, and compares those that are there.
fn pull(engine: &dyn CopyEngine, memory: &Arc<Noting>, blocks: &[u64]) -> Vec<bool> {
    let mut room = vec![0u8; blocks.len() * BLOCK as usize];
    let mut lists: Vec<ReadList<'_>> =
        blocks.iter().zip(room.chunks_mut(BLOCK as usize)).map(|(block, room)| ReadList::scatter(block * BLOCK, [room])).collect();
    let outcomes = engine.pull_each(&**memory, &mut lists, Checksum::Off);
    let right = |((outcome, block), room): ((&Outcome, &u64), &[u8])| {
        assert!(outcome.is_err() || room == &memory.bytes[(block * BLOCK) as usize..][..BLOCK as usize], "block {block}");
        outcome.is_ok()
    };
    outcomes.iter().zip(blocks).zip(room.chunks(BLOCK as usize)).map(right).collect()
}

#[test]
fn the_next_blocks_are_told_of_before_they_are_copied_and_no_more() {
    for is_mapped in [false, true] {
        let memory = Arc::new(Noting::new(64, is_mapped));
        let engine = over(&memory, "read_ahead=2");
        // Not in the order in which they lie: a device that reads on by itself would fetch others.
        let chain: Vec<u64> = (0..24).map(|number| number * 37 % 64).collect();
        assert!(pull(&*engine, &memory, &chain).into_iter().all(|done| done));
        let last_page = |block: u64| block * 8 + 7;
        for (place, &block) in chain.iter().enumerate().skip(4) {
            let (told, copied) = (memory.first(last_page(block), false), memory.first(block * 8, true).unwrap());
            assert!(told.is_some_and(|told| told < copied), "block {place} of the chain was not told of before its copy");
            let step = place / 4 * 4;
            let before = memory.first(last_page(chain[step - 1]), true).unwrap();
            assert!(place - step >= 2 || told.unwrap() < before, "block {place} of the chain got its hints with its own step");
        }
        // Steps are of four blocks (128 KiB), and two more get hints.
        for (place, &block) in chain.iter().enumerate().skip(10) {
            let told = memory.first(block * 8, false).unwrap();
            let begun = memory.first(chain[place / 4 * 4 - 8 + 3] * 8, true).unwrap();
            assert!(told > begun, "block {place} of the chain got its hints before the step in front of the last was copied");
        }
        assert!(held(&memory.kept).is_empty(), "a line that may lie in a cache of this host keeps the device from hearing of its page");
        let here = std::thread::current().name().map(String::from);
        let teller = if is_mapped { Some("cxl-ahead".to_owned()) } else { here };
        assert_eq!(*held(&memory.tellers), HashSet::from([teller]), "a copy does not wait for the hints to the device");
        let pages = engine.ahead_pages();
        assert_eq!(pages.given, pages.used + pages.wasted);
        assert!(pages.used >= 20 * 8 && pages.given <= 24 * 8, "{pages:?}");
    }
}

/// An engine that notes how many lists it is given at a time.
#[derive(Default)]
struct Counting(Mutex<Vec<usize>>);

impl CopyEngine for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn publish_each(&self, _: &dyn Coherence, _: &[WriteList<'_>], _: Checksum) -> Vec<Outcome> {
        Vec::new()
    }

    fn pull_each(&self, _: &dyn Coherence, lists: &mut [ReadList<'_>], _: Checksum) -> Vec<Outcome> {
        held(&self.0).push(lists.len());
        lists.iter().map(|_| Ok(None)).collect()
    }

    fn is_settled(&self, _: u64) -> bool {
        true
    }

    fn open_gpu(&self, _: u32) -> Result<Reach> {
        Err(Error::Invalid("no GPU".into()))
    }

    fn counters(&self) -> Vec<Copied> {
        Vec::new()
    }
}

#[test]
fn lists_of_a_gpu_are_one_copy_and_told_of_to_none() {
    let (memory, inner) = (Arc::new(Noting::new(32, false)), Arc::new(Counting::default()));
    let config = "engine=cpu,read_ahead=4".parse().unwrap();
    let engine = AheadEngine::over(inner.clone(), memory.clone(), &config, None);
    let gpu = LocalPlace::Gpu(OnGpu { device: 0, after: After::Nothing });
    let mut room = vec![0u8; 16 * BLOCK as usize];
    for on_gpu in [false, true] {
        let list = |(block, room): (u64, &mut [u8])| {
            // SAFETY: the list names no stream and no event.
            let mut list = if on_gpu { unsafe { ReadList::lying_on(gpu) } } else { ReadList::new() };
            let address = NonNull::from(&mut *room).cast::<u8>();
            // SAFETY: the engine below touches no piece.
            unsafe { list.push_raw(block * BLOCK, LocalRange { address, len_bytes: room.len() }) };
            list
        };
        let mut lists: Vec<ReadList<'_>> = (0..).zip(room.chunks_mut(BLOCK as usize)).map(list).collect();
        assert!(engine.pull_each(&*memory, &mut lists, Checksum::Off).iter().all(Result::is_ok));
    }
    assert_eq!(*held(&inner.0), [4, 4, 4, 4, 16]);
    assert_eq!(engine.ahead_pages().given, 16 * 8);
}

#[test]
fn a_thread_that_falls_behind_is_told_of_no_more_than_it_will_be_asked_for() {
    let memory = Arc::new(Noting::new(400, true));
    let mut room = vec![0u8; 400 * BLOCK as usize];
    let lists: Vec<ReadList<'_>> =
        (0..).zip(room.chunks_mut(BLOCK as usize)).map(|(block, room)| ReadList::scatter(block * BLOCK, [room])).collect();
    let call = Arc::new(CopyCall::of(&lists, PAGE, memory.len_bytes(), Arc::default()));
    let busy = held(&memory.busy);
    let hints = HintThread::start(memory.clone(), None);
    hints.add(&call, 0..400);
    drop(busy);
    // The last one that found room, and at most one more, which the thread had taken.
    let last = |list: u64| memory.first(list * 8 + 7, false).is_some();
    let deadline = Instant::now() + Duration::from_secs(120);
    while !last(255) {
        assert!(Instant::now() < deadline, "the thread never came to the last list");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(hints);
    assert!(!last(257));
}

#[test]
fn nothing_is_told_of_unless_it_is_asked_for() {
    let memory = Arc::new(Noting::new(8, false));
    let engine = over(&memory, "read_ahead=off");
    assert!(pull(&*engine, &memory, &[1, 2, 3]).into_iter().all(|done| done));
    assert!(held(&memory.steps).iter().all(|(_, is_copied)| *is_copied));
    assert_eq!(engine.ahead_pages(), AheadPages::default());
}

#[test]
fn a_block_that_fails_fails_alone_and_its_pages_were_told_of_in_vain() {
    let memory = Arc::new(Noting { bad_page: Some(9 * 8 + 3), ..Noting::new(32, false) });
    let engine = over(&memory, "read_ahead=8");
    let chain: Vec<u64> = (4..20).collect();
    let done = pull(&*engine, &memory, &chain);
    assert_eq!(done.iter().filter(|done| !**done).count(), 1);
    assert!(!done[5]);
    assert_eq!(engine.ahead_pages(), AheadPages { given: 16 * 8, used: 15 * 8, wasted: 8 });
}

#[test]
fn what_was_copied_is_not_told_of_any_more() {
    let memory = Noting::new(3, false);
    let mut room = vec![0u8; 3 * BLOCK as usize];
    let lists: Vec<ReadList<'_>> =
        (0..3).zip(room.chunks_mut(BLOCK as usize)).map(|(block, room)| ReadList::scatter(block * BLOCK, [room])).collect();
    let pages = Arc::new(Pages::default());
    let call = CopyCall::of(&lists, PAGE, memory.len_bytes(), pages.clone());
    call.end_list(0, true);
    call.give(0, &memory);
    assert!(held(&memory.steps).is_empty(), "a device got hints for pages that were there already");
    call.give(1, &memory);
    call.give(2, &memory);
    call.end_list(1, true);
    call.end_list(2, false);
    assert_eq!([&pages.given, &pages.used, &pages.wasted].map(|count| count.load(Relaxed)), [16, 8, 8]);
}

#[test]
fn a_list_that_names_bytes_outside_the_pool_is_refused_and_not_told_of() {
    let memory = Arc::new(Noting::new(2, false));
    let engine = over(&memory, "read_ahead=1");
    let mut room = [0u8; 64];
    for offset in [2 * BLOCK, u64::MAX - 3, 2 * BLOCK - 63] {
        let mut list = ReadList::scatter(offset, [&mut room[..]]);
        assert!(matches!(engine.pull(&*memory, &mut list, Checksum::Off), Err(Error::OutOfRange { .. })), "{offset:#x}");
    }
    assert!(held(&memory.steps).is_empty());
}

#[test]
fn one_line_stands_for_a_page_and_lies_in_the_list() {
    let mut room = vec![0u8; 3 * PAGE as usize];
    let lines = |offset: u64, len: usize, page: u64| {
        let address = NonNull::from(&room[0]);
        let mut list = ReadList::new();
        // SAFETY: only looked at here, never copied.
        unsafe { list.push_raw(offset, LocalRange { address, len_bytes: len }) };
        list.lines_by_page(page, 1 << 20)
    };
    assert_eq!(lines(0, 0, PAGE), [0u64; 0]);
    assert_eq!(lines(100, 1, PAGE), [64]);
    assert_eq!(lines(PAGE - 1, 2, PAGE), [PAGE - 64, PAGE]);
    assert_eq!(lines(3 * PAGE, 2 * PAGE as usize, PAGE), [3 * PAGE, 4 * PAGE]);
    assert_eq!(lines(3 * PAGE, 2 * PAGE as usize, 4 * PAGE), [3 * PAGE]);
    assert_eq!(lines(3 * PAGE + 100, 8 * PAGE as usize, 3 * PAGE), [3 * PAGE + 64, 6 * PAGE, 9 * PAGE]);
    room.fill(1);
    // Pieces of one page, apart from each other, are one page.
    let mut list = ReadList::new();
    for (number, piece) in room.chunks_mut(64).take(8).enumerate() {
        list.push(128 * number as u64, piece);
    }
    assert_eq!(list.lines_by_page(PAGE, 1 << 20), [0]);
    // Pieces that follow each other share its stretches; one that lies elsewhere begins a new one.
    let [first, second, third] = room.as_chunks_mut::<{ PAGE as usize }>().0 else { unreachable!() };
    let mut list = ReadList::new();
    list.push(PAGE, &mut first[..]);
    list.push(9 * PAGE, &mut third[..]);
    list.push(10 * PAGE, &mut second[..]);
    assert_eq!(list.lines_by_page(2 * PAGE, 1 << 20), [PAGE, 9 * PAGE]);
}

/// Copies of 32 pages on a device: the time of a page, by the number of blocks with hints.
fn drive(depth: &mut Depth, copies: usize, page_ns: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    (0..copies)
        .map(|number| {
            depth.learn(1, 32 * PAGE, (32.0 * page_ns(depth.blocks(), number)) as u64);
            depth.blocks()
        })
        .collect()
}

#[test]
fn as_many_blocks_are_told_of_as_it_takes() {
    // Flash: 40 us a page, of which each block told of hides a part; three hide all.
    let flash = |blocks: usize, _| if blocks >= 3 { 400.0 } else { 40_000.0 / (1.0 + 8.0 * blocks as f64) };
    let mut depth = Depth::new(ReadAhead::Auto);
    let seen = drive(&mut depth, 30, flash);
    assert_eq!(seen.last(), Some(&4), "{seen:?}");
    // Now and then fewer are tried, and seldom.
    let late = drive(&mut depth, 20_000, flash);
    let waiting = late.iter().filter(|blocks| **blocks < 3).count();
    assert!(waiting < 200, "{waiting} of {} copies with too few", late.len());
    // All of it comes into the device's memory.
    let calm = drive(&mut depth, 100_000, |_, _| 400.0);
    assert_eq!(calm.last(), Some(&0));
}

#[test]
fn memory_is_told_of_nothing_whatever_else_its_copies_wait_for() {
    let mut depth = Depth::new(ReadAhead::Auto);
    assert!(drive(&mut depth, 10_000, |_, _| 700.0).iter().all(|blocks| *blocks == 0));
    // A neighbour takes the processor now and then: single waits are no reason.
    assert!(drive(&mut depth, 10_000, |_, number| if number % 20 == 0 { 90_000.0 } else { 700.0 }).iter().all(|blocks| *blocks == 0));
    // And so often that half of the copies wait: hints are tried, are of no help, and are left alone for longer and longer.
    let seen = drive(&mut depth, 50_000, |_, number| if number % 2 == 0 { 90_000.0 } else { 700.0 });
    let told = seen.iter().filter(|blocks| **blocks > 0).count();
    assert!(told > 0 && told < 5_000, "{told}");
}

#[test]
fn a_number_of_blocks_that_is_given_stays() {
    let mut depth = Depth::new(ReadAhead::Blocks(3));
    assert!(drive(&mut depth, 1000, |_, number| if number % 3 == 0 { 90_000.0 } else { 300.0 }).iter().all(|blocks| *blocks == 3));
}
