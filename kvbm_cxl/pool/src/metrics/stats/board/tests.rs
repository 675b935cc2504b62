// SPDX-License-Identifier: Apache-2.0
use super::*;
use proptest::prelude::*;

const BLOCKS: Stat = Stat::PublishedBlocks;
const PINS: Stat = Stat::Pins;

fn counted(blocks: u64, pins: i64) -> Metrics {
    let metrics = Metrics::new();
    metrics.publish_total.add(blocks);
    metrics.pins.set(pins);
    metrics
}

/// A process with `tag` in row `index` counts.
fn claim(board: &StatsBoard, index: usize, tag: u32, metrics: &Metrics) {
    board.claim(&board.area().rows[index], tag, metrics);
}

fn totals(board: &StatsBoard) -> (u64, u64) {
    (board.total(BLOCKS), board.total(PINS))
}

#[test]
fn what_the_dead_counted_stays_and_what_they_held_goes() {
    let board = StatsBoard::private().unwrap();
    claim(&board, 0, 1, &counted(10, 4));
    claim(&board, 63, 2, &counted(300, 5));
    assert_eq!(totals(&board), (310, 9));
    board.fold_gone(&|tag| tag == 2);
    assert_eq!(totals(&board), (310, 5));
    board.fold_gone(&|_| false);
    board.fold_gone(&|_| false);
    assert_eq!(totals(&board), (310, 0));
}

#[test]
fn a_process_in_the_place_of_a_dead_one_takes_nothing_away() {
    let board = StatsBoard::private().unwrap();
    claim(&board, 5, 1, &counted(10, 4));
    // The row was not folded before the next process came to the same place.
    claim(&board, 5, 1 << 16 | 1, &counted(2, 1));
    assert_eq!(totals(&board), (12, 1));
}

#[test]
fn threads_of_a_process_that_overtake_each_other_do_not_turn_a_counter_back() {
    let row = CounterRow::default();
    row.raise(BLOCKS, 7);
    row.raise(BLOCKS, 5);
    row.raise(PINS, 7);
    row.raise(PINS, 5);
    assert_eq!((row.get(BLOCKS), row.get(PINS)), (7, 5));
}

#[test]
fn a_board_of_another_build_is_refused() {
    let board = StatsBoard::private().unwrap();
    board.area().version.store(VERSION + 1, Ordering::Relaxed);
    // SAFETY: the same bytes as `board`, which is kept alive.
    assert!(matches!(unsafe { StatsBoard::at(board.start.cast(), board._owner.clone()) }, Err(Error::Invalid(_))));
}

#[test]
fn whatever_lies_in_local_memory_is_survived() {
    let board = StatsBoard::private().unwrap();
    board.area().state.store(u64::MAX, Ordering::Relaxed);
    claim(&board, 0, 1, &counted(3, 3));
    board.fold_gone(&|_| false);
    assert_eq!(totals(&board), (3, 0));
}

/// A step of the story of a host, as seen by its board.
#[derive(Clone, Debug)]
enum Step {
    /// The process in this row counts on, or a new one comes.
    Count(usize, u64),
    /// It dies.
    Die(usize),
    /// A process folds the dead rows.
    Fold,
    /// A process begins to fold this row, if its process is dead, and dies when the base counts already.
    DieInFold(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3usize, 1..1000u64).prop_map(|(row, more)| Step::Count(row, more)),
        (0..3usize).prop_map(Step::Die),
        Just(Step::Fold),
        (0..3usize).prop_map(Step::DieInFold),
    ]
}

proptest! {
    #[test]
    fn no_count_is_lost_or_counted_twice_at_any_death(steps in proptest::collection::vec(step(), 1..60)) {
        let board = StatsBoard::private().unwrap();
        // Tag and count of the process in each row; a tag is never used again.
        let (mut living, mut next_tag, mut all) = ([None; 3], 1, 0);
        for step in steps {
            let is_alive = |tag| living.iter().flatten().any(|(alive, _)| *alive == tag);
            match step {
                Step::Count(index, more) => {
                    board.fold_gone(&is_alive);
                    let (tag, count) = living[index].unwrap_or((next_tag, 0));
                    next_tag += u32::from(tag == next_tag);
                    let count = count + more;
                    living[index] = Some((tag, count));
                    all += more;
                    let row = &board.area().rows[index];
                    if row.tag.load(Ordering::Relaxed) == tag {
                        row.raise(BLOCKS, count);
                    } else {
                        claim(&board, index, tag, &counted(count, 0));
                    }
                }
                Step::Die(index) => living[index] = None,
                Step::Fold => board.fold_gone(&is_alive),
                Step::DieInFold(index) => {
                    board.finish_fold();
                    let tag = board.area().rows[index].tag.load(Ordering::Relaxed);
                    if tag != 0 && !is_alive(tag) {
                        board.count_in(index);
                    }
                }
            }
            board.finish_fold();
            prop_assert_eq!(board.total(BLOCKS), all);
        }
    }
}
