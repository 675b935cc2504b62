// SPDX-License-Identifier: Apache-2.0
//! Line charts as SVG: panels side by side with one legend, on a background of its own so that they read on light and dark pages.

use std::fmt::Write;

/// A curve.
pub struct Curve {
    /// By x, which is above 0.
    pub points: Vec<(f64, f64)>,
}

/// Curves over one pair of axes: logarithmic across, linear up.
pub struct Panel {
    /// Above the axes.
    pub title: String,
    /// What lies across.
    pub x_label: String,
    /// Where grid lines stand across.
    pub x_marks: Vec<f64>,
    /// What goes up.
    pub y_label: String,
    /// A level that the axis has, beside those of the points.
    pub y_from: Option<f64>,
    /// From one grid line to the next one up, above 0.
    pub y_step: f64,
    /// One for each key of the picture.
    pub curves: Vec<Curve>,
}

/// 1, 2 or 5 times a power of ten, so that `height` has 4 to 10 steps; 1 where there is no height.
pub fn step(height: f64) -> f64 {
    if !(height.is_finite() && height > 0.0) {
        return 1.0;
    }
    let power = 10f64.powf((height / 5.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|step| height / step <= 6.0).unwrap_or(power)
}

/// How a curve is drawn: a colour, which those who see fewer of them tell apart too, a dash, a width. Later ones lie on top, so that where
/// two agree both are seen.
pub struct Style(pub &'static str, pub &'static str, pub f64);

/// A curve in the legend.
pub struct Key {
    /// What it is called.
    pub name: String,
    /// Below the name.
    pub meaning: String,
    /// How it is drawn.
    pub style: Style,
}

const COLUMNS: usize = 3;
const PANEL: (f64, f64) = (330.0, 270.0);
const MARGIN: (f64, f64, f64, f64) = (48.0, 30.0, 12.0, 44.0); // left, top, right, bottom
const HEADING: f64 = 46.0;
/// More than any step leaves room for.
const MOST_GRID_LINES: u32 = 100;

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
        let y = (low(&mut points().map(|point| point.1).chain(panel.y_from)), high(&mut points().map(|point| point.1)));
        let (bottom, top_level) = ((y.0 / panel.y_step).floor() * panel.y_step, (y.1 / panel.y_step).ceil() * panel.y_step);
        Axes {
            left: left + MARGIN.0,
            top: top + MARGIN.1,
            x: (low(&mut points().map(|point| point.0)), high(&mut points().map(|point| point.0))),
            // A level line gets a step of room, so that it can be placed.
            y: (bottom, if top_level > bottom { top_level } else { bottom + panel.y_step }),
        }
    }

    fn size(&self) -> (f64, f64) {
        (PANEL.0 - MARGIN.0 - MARGIN.2, PANEL.1 - MARGIN.1 - MARGIN.3)
    }

    /// A single x stands in the middle.
    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (width, height) = self.size();
        let across = if self.x.1 > self.x.0 { (x / self.x.0).ln() / (self.x.1 / self.x.0).ln() } else { 0.5 };
        let up = (y - self.y.0) / (self.y.1 - self.y.0);
        (self.left + across * width, self.top + (1.0 - up) * height)
    }
}

fn draw_panel(out: &mut String, panel: &Panel, keys: &[Key], left: f64, top: f64) {
    let axes = Axes::of(panel, left, top);
    let (width, height) = axes.size();
    text(out, axes.left, axes.top - 10.0, "start", "title", &panel.title);
    let decimals = (-panel.y_step.log10()).ceil().clamp(0.0, 6.0) as usize;
    for step in 0..=MOST_GRID_LINES {
        let level = axes.y.0 + f64::from(step) * panel.y_step;
        if level > axes.y.1 + panel.y_step / 2.0 {
            break;
        }
        let (_, y) = axes.place((axes.x.0, level));
        line(out, (axes.left, y), (axes.left + width, y), "grid");
        text(out, axes.left - 6.0, y + 4.0, "end", "tick", &format!("{level:.decimals$}"));
    }
    for &mark in &panel.x_marks {
        let (x, _) = axes.place((mark, axes.y.0));
        line(out, (x, axes.top), (x, axes.top + height), "grid");
        text(out, x, axes.top + height + 15.0, "middle", "tick", &format!("{mark}"));
    }
    text(out, axes.left + width / 2.0, axes.top + height + 32.0, "middle", "label", &panel.x_label);
    let (x, y) = (left + 13.0, axes.top + height / 2.0);
    let _ = write!(out, r#"<g transform="rotate(-90 {x:.1} {y:.1})">"#);
    text(out, x, y, "middle", "label", &panel.y_label);
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
    let apart = if keys.iter().all(|key| key.meaning.is_empty()) { 24.0 } else { 33.0 };
    for (index, Key { name, meaning, style: Style(colour, dash, width) }) in keys.iter().enumerate() {
        let (x, y) = (left + MARGIN.0 - 20.0, top + MARGIN.1 + 14.0 + index as f64 * apart);
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
    let title = heading.replace('&', "&amp;").replace('<', "&lt;");
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" viewBox="0 0 {width:.0} {height:.0}" role="img">
<title>{title}</title>
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_few() {
        assert_eq!([1.0, 6.0, 23.0, 37.4, 100.0, 0.013].map(step), [0.2, 1.0, 5.0, 10.0, 20.0, 0.005]);
        assert_eq!([0.0, -3.0, f64::NAN, f64::INFINITY].map(step), [1.0; 4]);
    }

    #[test]
    fn one_point_and_level_lines_have_a_place() {
        let curve = || Curve { points: vec![(64.0, 2.0)] };
        let panel = Panel {
            title: "one & <only>".into(),
            x_label: "GiB".into(),
            x_marks: vec![64.0],
            y_label: "s".into(),
            y_from: None,
            y_step: 0.5,
            curves: vec![curve()],
        };
        let keys = [Key { name: "a".into(), meaning: String::new(), style: Style("#000000", "", 1.0) }];
        let picture = draw("h", &[panel], &keys);
        assert!(!picture.contains("NaN") && !picture.contains("inf") && picture.contains("one &amp; &lt;only>"), "{picture}");
        assert!(picture.contains(">2.0<") && picture.contains(">2.5<"), "{picture}");
    }
}
