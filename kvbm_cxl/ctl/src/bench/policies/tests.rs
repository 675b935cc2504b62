// SPDX-License-Identifier: Apache-2.0
//! Traces have the statistics they claim, and hits are counted as worked out by hand.

use super::*;
use std::collections::HashSet;
use workload::Piece;

/// Requests as strings: two that begin alike share as many blocks as they have letters in common there.
fn letters(requests: &[&str]) -> Trace {
    let mut trace = Trace::new("letters", "letters");
    for request in requests {
        let pieces: Vec<Piece> = request.bytes().map(|letter| Piece { text: letter.into(), tokens: BLOCK_TOKENS }).collect();
        trace.ask(&pieces, 0);
    }
    trace
}

fn of(trace: &Trace, room: usize, contender: Contender) -> (u64, u64) {
    let rates = replay(trace, room, contender).unwrap();
    let counted: usize = trace.requests().skip(trace.requests().count() / 4).map(<[u32]>::len).sum();
    let hits = |rate: f64| (rate * counted as f64).round() as u64;
    (hits(rates.block), hits(rates.prefix))
}

#[test]
fn a_b_and_c_have_the_moments_of_the_table() {
    for (number, unique) in [(0, (1073.0, 1549.0)), (1, (1215.0, 1693.0)), (2, (1631.0, 2027.0))] {
        let mut sums = [(0.0, 0.0); 2];
        let mut count = 0.0;
        // A context or two get a good part of the requests of one seed, whatever their length.
        for seed in 0..8 {
            let trace = generate(number, 4000, seed);
            for &(input, own) in &trace.tokens {
                for (sum, tokens) in sums.iter_mut().zip([input as f64, own as f64]) {
                    *sum = (sum.0 + tokens, sum.1 + tokens * tokens);
                }
                count += 1.0;
            }
        }
        for (sum, (mean, deviation)) in sums.into_iter().zip([(4449.0, 2424.0), unique]) {
            let found = (sum.0 / count, (sum.1 / count - (sum.0 / count).powi(2)).sqrt());
            assert!((found.0 / mean - 1.0).abs() < 0.03, "{number}: {found:?}, table {mean} ({deviation})");
            assert!((found.1 / deviation - 1.0).abs() < 0.1, "{number}: {found:?}, table {mean} ({deviation})");
        }
    }
}

#[test]
fn blocks_are_shared_up_to_where_chains_part() {
    let trace = letters(&["abcd", "abce", "bbcd", "abcd"]);
    let requests: Vec<&[u32]> = trace.requests().collect();
    assert_eq!(requests, [&[0, 1, 2, 3][..], &[0, 1, 2, 4], &[5, 6, 7, 8], &[0, 1, 2, 3]]);
    let keys: HashSet<[u8; 16]> = trace.blocks.iter().map(|block| block.key).collect();
    assert_eq!(keys.len(), 9);
    assert!(trace.blocks[4].parent == Some(trace.blocks[2].key) && trace.blocks[5].parent.is_none());
    // What does not fill a block is not cached, and a block that holds the end of one text and the start of another belongs to both.
    let mut trace = Trace::new("pieces", "pieces");
    let (system, own, other) = (trace.fresh(100), trace.fresh(100), trace.fresh(90));
    trace.ask(&[system, own], 100);
    trace.ask(&[system, other], 90);
    assert_eq!(trace.requests().collect::<Vec<_>>(), [&[0, 1, 2][..], &[0, 3]]);
}

#[test]
fn hits_are_counted_from_the_root_and_wherever() {
    // The first of four or five requests is not counted. Room for three.
    let trace = letters(&["abc", "ef", "abc", "abc"]);
    // ef takes the cells of a and ab. Then a takes that of abc, and so on: nothing is found before the last request.
    assert_eq!(of(&trace, 3, Contender::Fifo), (3, 3));
    // Leaves first: ef takes the cells of abc and ab, so that a is found.
    assert_eq!(of(&trace, 3, Contender::LeafLru), (4, 4));
    // With the future known, ef is not kept at all.
    assert_eq!(of(&trace, 3, Contender::Optimal), (6, 6));
    let gap = letters(&["a", "x", "ab", "e", "ab"]);
    // In order of entry e takes the cell of a, and ab is there at the end, but not reached.
    assert_eq!(of(&gap, 3, Contender::Fifo), (2, 1));
    // By use it takes that of x.
    assert_eq!(of(&gap, 3, Contender::Lru), (3, 3));
    assert_eq!(of(&gap, 3, Contender::LruBackwards), (3, 3));
}

#[test]
fn a_seed_is_a_trace() {
    for number in 0..WORKLOADS {
        let keys = |seed| generate(number, 300, seed).blocks.iter().map(|block| block.key).collect::<Vec<_>>();
        assert_eq!(keys(1), keys(1));
        assert_ne!(keys(1), keys(2));
    }
}

#[test]
fn rates_lie_between_nothing_and_the_optimum() {
    for number in 0..WORKLOADS {
        let trace = generate(number, 400, 9);
        let study = study(&trace, &[3, 20, 100]).unwrap();
        assert_eq!(study.requests, 400);
        for row in &study.rows {
            let best = row.rates(Contender::Optimal);
            assert_eq!(best.block, best.prefix, "what is needed last is never before what continues it");
            for &(contender, rates) in &row.rates {
                assert!(rates.prefix <= rates.block && rates.block <= best.block, "{contender:?} {rates:?} {best:?}");
                assert!(rates.prefix > 0.0);
                if row.cache_percent == 100 {
                    assert_eq!(rates, best, "{contender:?}: with room for all there is nothing to choose");
                }
            }
            let leaf = row.rates(Contender::LeafLru);
            assert_eq!(leaf.block, leaf.prefix, "no block without those before it");
        }
    }
}

#[test]
fn the_picture_has_every_curve_within_its_frame() {
    let studies: Vec<Study> = (0..WORKLOADS).map(|number| study(&generate(number, 200, 1), &[5, 50, 100]).unwrap()).collect();
    let picture = picture(&studies);
    assert_eq!((picture.matches("<polyline").count(), picture.matches("<text").count() > 60), (WORKLOADS * 6, true));
    for points in picture.split("points=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
        let places: Vec<(f64, f64)> =
            points.split(' ').map(|point| point.split_once(',').unwrap()).map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).collect();
        assert!(places.len() == 3 && places.iter().all(|&(x, y)| (0.0..1000.0).contains(&x) && (46.0..586.0).contains(&y)), "{points}");
        assert!(places.is_sorted_by(|one, next| one.0 < next.0));
    }
    let text = csv(&studies, 1);
    assert_eq!(text.lines().count(), 1 + WORKLOADS * 3 * Contender::ALL.len());
    assert!(markdown(&studies, 1).lines().filter(|line| line.starts_with("| 5 %")).count() == WORKLOADS);
}
