// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn times_are_shown_exactly() {
    let shown = [0, 1, 256, 1_000_000_000, 1_500_000_000, 17_179_869_184, 90_000_000_010].map(|ns| Seconds { ns }.to_string());
    assert_eq!(shown, ["0", "0.000000001", "0.000000256", "1", "1.5", "17.179869184", "90.00000001"]);
}

#[test]
fn text_from_outside_stays_within_its_quotes() {
    let mut text = String::new();
    let mut out = Exposition::new(&mut text);
    out.family("a", Kind::Gauge, "one\n\"two\" \\");
    out.sample("a", "", &[("x", "\"} 1\nb{\\"), ("y", "")], 7);
    assert_eq!(text, "# HELP a one\\n\"two\" \\\\\n# TYPE a gauge\na{x=\"\\\"} 1\\nb{\\\\\",y=\"\"} 7\n");
}
