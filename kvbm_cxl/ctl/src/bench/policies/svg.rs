// SPDX-License-Identifier: Apache-2.0
//! Line charts as SVG: one panel per workload, on a background of its own so that they read on light and dark pages.

use std::fmt::Write;

/// A curve.
pub struct Curve {
    /// By x, both in per cent.
    pub points: Vec<(f64, f64)>,
}

/// Curves over one pair of axes.
pub struct Panel {
    pub title: String,
    pub curves: Vec<Curve>,
}

/// How a curve is drawn: a colour, which those who see fewer of them tell apart too, a dash, a width. Later ones lie on top, so that where
/// two agree both are seen.
pub struct Style(pub &'static str, pub &'static str, pub f64);

/// A curve in the legend.
pub struct Key {
    pub name: &'static str,
    pub meaning: &'static str,
    pub style: Style,
}

const COLUMNS: usize = 3;
const PANEL: (f64, f64) = (330.0, 270.0);
const MARGIN: (f64, f64, f64, f64) = (48.0, 30.0, 12.0, 44.0); // left, top, right, bottom
const HEADING: f64 = 46.0;

fn text(out: &mut String, x: f64, y: f64, anchor: &str, class: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{words}</text>"#);
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), class: &str) {
    let _ = writeln!(out, r#"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" class="{class}"/>"#, from.0, from.1, to.0, to.1);
}

/// All points of a panel, whose axes they set.
struct Axes {
    left: f64,
    top: f64,
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn of(panel: &Panel, left: f64, top: f64) -> Self {
        let points = || panel.curves.iter().flat_map(|curve| &curve.points);
        let low = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MAX, f64::min);
        let high = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MIN, f64::max);
        let y = (low(&mut points().map(|point| point.1)), high(&mut points().map(|point| point.1)));
        Axes {
            left: left + MARGIN.0,
            top: top + MARGIN.1,
            x: (low(&mut points().map(|point| point.0)), high(&mut points().map(|point| point.0))),
            y: ((y.0 / 10.0).floor() * 10.0, (y.1 / 10.0).ceil() * 10.0),
        }
    }

    fn size(&self) -> (f64, f64) {
        (PANEL.0 - MARGIN.0 - MARGIN.2, PANEL.1 - MARGIN.1 - MARGIN.3)
    }

    /// Logarithmic across, linear up.
    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (width, height) = self.size();
        let across = (x / self.x.0).ln() / (self.x.1 / self.x.0).ln();
        let up = (y - self.y.0) / (self.y.1 - self.y.0);
        (self.left + across * width, self.top + (1.0 - up) * height)
    }
}

fn draw_panel(out: &mut String, panel: &Panel, keys: &[Key], left: f64, top: f64) {
    let axes = Axes::of(panel, left, top);
    let (width, height) = axes.size();
    text(out, axes.left, axes.top - 10.0, "start", "title", &panel.title);
    for step in 0.. {
        let level = axes.y.0 + f64::from(step) * 10.0;
        if level > axes.y.1 {
            break;
        }
        let (_, y) = axes.place((axes.x.0, level));
        line(out, (axes.left, y), (axes.left + width, y), "grid");
        text(out, axes.left - 6.0, y + 4.0, "end", "tick", &format!("{level:.0}"));
    }
    for mark in [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0] {
        let (x, _) = axes.place((mark, axes.y.0));
        line(out, (x, axes.top), (x, axes.top + height), "grid");
        text(out, x, axes.top + height + 15.0, "middle", "tick", &format!("{mark:.0}"));
    }
    text(out, axes.left + width / 2.0, axes.top + height + 32.0, "middle", "label", "cache size, % of the working set");
    let (x, y) = (left + 13.0, axes.top + height / 2.0);
    let _ = write!(out, r#"<g transform="rotate(-90 {x:.1} {y:.1})">"#);
    text(out, x, y, "middle", "label", "prefix hit rate, %");
    out.push_str("</g>\n");
    for (curve, Key { style: Style(colour, dash, width), .. }) in panel.curves.iter().zip(keys) {
        let points: Vec<(f64, f64)> = curve.points.iter().map(|&point| axes.place(point)).collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let path = path.join(" ");
        let pen = format!(r#"class="curve" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}""#);
        let _ = writeln!(out, r#"<polyline points="{path}" {pen}/>"#);
        for (x, y) in points {
            let _ = writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="{:.1}" fill="{colour}"/>"#, width / 2.0 + 1.2);
        }
    }
}

fn draw_legend(out: &mut String, keys: &[Key], left: f64, top: f64) {
    for (index, Key { name, meaning, style: Style(colour, dash, width) }) in keys.iter().enumerate() {
        let (x, y) = (left + MARGIN.0 - 20.0, top + MARGIN.1 + 14.0 + index as f64 * 33.0);
        let pen = format!(r#"class="curve" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}""#);
        let _ = writeln!(out, r#"<line x1="{x:.1}" y1="{y:.1}" x2="{:.1}" y2="{y:.1}" {pen}/>"#, x + 36.0);
        let _ = writeln!(out, r#"<circle cx="{:.1}" cy="{y:.1}" r="{:.1}" fill="{colour}"/>"#, x + 18.0, width / 2.0 + 1.2);
        text(out, x + 46.0, y + 1.0, "start", "label", name);
        text(out, x + 46.0, y + 15.0, "start", "tick", meaning);
    }
}

/// The picture. `keys` says what each curve is, in the order of the curves of every panel.
pub fn draw(heading: &str, panels: &[Panel], keys: &[Key]) -> String {
    let rows = (panels.len() + 1).div_ceil(COLUMNS);
    let (width, height) = (COLUMNS as f64 * PANEL.0 + 10.0, HEADING + rows as f64 * PANEL.1);
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" viewBox="0 0 {width:.0} {height:.0}" role="img">
<title>{heading}</title>
<style>
text {{ font-family: "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1a1a1a; }}
.heading {{ font-size: 16px; font-weight: bold; }}
.title {{ font-size: 13px; font-weight: bold; }}
.label {{ font-size: 12px; }}
.tick {{ font-size: 11px; fill: #4d4d4d; }}
.grid {{ stroke: #dcdcdc; stroke-width: 1; }}
.curve {{ fill: none; }}
</style>
<rect width="{width:.0}" height="{height:.0}" rx="6" fill="#ffffff"/>
"##
    );
    text(&mut out, width / 2.0, 28.0, "middle", "heading", heading);
    let corner = |index: usize| ((index % COLUMNS) as f64 * PANEL.0, HEADING + (index / COLUMNS) as f64 * PANEL.1);
    for (index, panel) in panels.iter().enumerate() {
        let (left, top) = corner(index);
        draw_panel(&mut out, panel, keys, left, top);
    }
    let (left, top) = corner(panels.len());
    draw_legend(&mut out, keys, left, top);
    out.push_str("</svg>\n");
    out
}
