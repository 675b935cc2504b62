// SPDX-License-Identifier: Apache-2.0
//! One block by the calls for one block, and by those for a list that holds just this one, in turn: what the path of its own for one block
//! saves. The code of the cache keeps both for as long as that is worth it.

use super::publish::publish_together;
use super::{BLOCKS, Lab, Member, NAMESPACE, alone, fill, join, key, place, refuse_emulated, uncache};
use crate::stats::{Estimate, median};
use crate::{Bench, wrong};
use cxl_pool::Result;
use cxl_pool::cache::{Published, Pulled};
use cxl_pool::copy::{LocalPlace, LocalRange};
use std::ptr::NonNull;
use std::time::Instant;

/// Sizes of the block, and the names of the ratios of a publish and of a pull.
const SIZES: [(usize, &str, &str); 3] = [
    (4 << 10, "publish_4k_list_over_one", "pull_4k_list_over_one"),
    (64 << 10, "publish_64k_list_over_one", "pull_64k_list_over_one"),
    (1 << 20, "publish_1m_list_over_one", "pull_1m_list_over_one"),
];
/// Blocks published before anything is measured, so that the locks of all parts of the hint table are here.
const WARM: u64 = 200;

/// Measures.
pub fn run(batches: u64) -> Result<Bench> {
    refuse_emulated()?;
    let title = "one block, by the calls for one and by those for a list".into();
    let mut bench = Bench { title, ..Bench::default() };
    for (size, publish_name, pull_name) in SIZES {
        let lab = Lab::new(size as u64, BLOCKS, 2 << 20)?;
        let owner = join(lab.pool(), &lab.state(), 0, alone(), false)?;
        let reader = join(lab.pool(), &lab.state(), 1, alone(), false)?;
        let mut taken: [[Vec<f64>; 2]; 2] = Default::default();
        let (mut source, mut found) = (vec![0; size], vec![1; size]);
        for number in 0..WARM + batches {
            for turn in 0..2 {
                // Which of the two is first alternates: the second one finds the branches of the first predicted.
                let by_list = (number + turn) % 2 == 1;
                let number = 2 * number + turn;
                fill(&mut source, number);
                let [published_ns, pulled_ns] = both(&lab, [&owner, &reader], number, &source, &mut found, by_list)?;
                if number >= 2 * WARM {
                    taken[0][usize::from(by_list)].push(published_ns);
                    taken[1][usize::from(by_list)].push(pulled_ns);
                }
            }
        }
        let [published, pulled] = &mut taken;
        for (what, [one, list], name) in [("publish", published, publish_name), ("pull", pulled, pull_name)] {
            bench.ratio(name, Estimate::of_ratios(list, one));
            bench.figure(format!("{what} of {} KiB, the call for one block", size >> 10), median(one), "ns");
            bench.figure(format!("{what} of {} KiB, the call for a list, which holds one", size >> 10), median(list), "ns");
        }
        [reader, owner].into_iter().try_for_each(Member::leave)?;
    }
    Ok(bench)
}

/// Publishes a block and pulls it from lines that are in no cache; how long each took, in nanoseconds. Evicts it afterwards.
fn both(lab: &Lab, [owner, reader]: [&Member; 2], number: u64, source: &[u8], found: &mut [u8], by_list: bool) -> Result<[f64; 2]> {
    let key = key(number);
    let start = Instant::now();
    if by_list {
        publish_together(owner, &[key], &[source])?;
    } else if owner.cache.publish(NAMESPACE, key, None, source)? != Published::Stored {
        return Err(wrong("a new block was not stored"));
    }
    let published_ns = start.elapsed().as_nanos() as f64;
    uncache(&**lab.memory(), place(&owner.cache, lab.pool(), key)?, source.len())?;
    let start = Instant::now();
    let pulled = if by_list {
        let range = LocalRange { address: NonNull::from(&mut *found).cast(), len_bytes: found.len() };
        // SAFETY: the range is `found`, which this function borrows alone, and memory of this process.
        let pulled = unsafe { reader.cache.pull_all_raw(NAMESPACE, &[key], LocalPlace::Host, |_, _| [range]) }?;
        pulled.first().copied()
    } else {
        Some(reader.cache.pull(NAMESPACE, key, found)?)
    };
    let pulled_ns = start.elapsed().as_nanos() as f64;
    if pulled != Some(Pulled::Hit { len_bytes: source.len() as u64 }) || found != source {
        return Err(wrong(format!("block {number} was not pulled as it was published: {pulled:?}")));
    }
    if !owner.cache.evict(NAMESPACE, key)? {
        return Err(wrong("a block of this process could not be evicted"));
    }
    Ok([published_ns, pulled_ns])
}
