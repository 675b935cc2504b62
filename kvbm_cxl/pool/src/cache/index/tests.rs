// SPDX-License-Identifier: Apache-2.0

use super::*;

fn window(text: &str) -> Vec<HintLine> {
    let mut lines = vec![HintLine::default(); text.len() / HINTS_PER_LINE];
    for (index, letter) in text.chars().enumerate() {
        let hint = match letter {
            '.' => Hint::Empty,
            'x' => Hint::Tomb,
            _ => Hint::Cell { fingerprint: 5, cell: index as u64 },
        };
        lines[index / HINTS_PER_LINE].set(index % HINTS_PER_LINE, hint);
    }
    lines
}

fn text(lines: &[HintLine]) -> String {
    let letter = |hint| match hint {
        Hint::Empty => '.',
        Hint::Tomb => 'x',
        Hint::Cell { .. } => 'c',
    };
    lines.iter().flat_map(|line| line.iter().map(letter).collect::<Vec<_>>()).collect()
}

#[test]
fn a_tomb_goes_only_in_front_of_an_empty_place() {
    for (before, at, after, changed) in [
        ("ccxx....", (0, 3), "cc......", 0..1),
        ("ccxc....", (0, 2), "ccxc....", 0..1),
        ("cxxxxx..", (1, 1), "c.......", 0..2),
        ("ccccxcxx", (1, 3), "ccccxcxx", 1..2),
        ("ccxxxc..", (1, 0), "ccxxxc..", 1..2),
    ] {
        let mut lines = window(before);
        assert_eq!(sweep_tombs(&mut lines, at), changed, "{before}");
        assert_eq!(text(&lines), after, "{before}");
    }
}

#[test]
fn digests_of_neighbours_are_far_apart() {
    let mut seen = std::collections::HashSet::new();
    for key in 0..1000u128 {
        for namespace in 0..3u128 {
            seen.insert(digest(Namespace(namespace.to_le_bytes()), BlockKey(key.to_le_bytes())));
        }
    }
    assert_eq!(seen.len(), 3000);
    let low: std::collections::HashSet<u64> = seen.iter().map(|digest| digest & 0xfff).collect();
    assert!(low.len() > 1800, "{}", low.len());
}
