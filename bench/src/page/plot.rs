//! SVG charts: lines over a logarithmic axis, and sorted bars.

use std::fmt::Write as _;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 380.0;
/// Space around the plot for axes and legend.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 180.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 46.0;
/// Distinguishable for colour-blind readers. The first one is leasehold's.
const COLOURS: [&str; 10] = [
    "#d62728", "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#7f7f7f",
    "#000000",
];

/// Which value of a bar chart comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Best {
    Lowest,
    Highest,
}

/// A line with its name in the legend.
pub(super) type Line = (String, Vec<(f64, f64)>);

/// A line chart with titles on both axes, which are logarithmic. Points at or below zero are left out.
#[must_use]
pub(super) fn lines(title: &str, across: &str, up: &str, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|(_, points)| points).filter(|(_, y)| *y > 0.0);
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    let (mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY);
    for (x, y) in points() {
        (low, high) = (low.min(y.log10().floor()), high.max(y.log10().ceil()));
        (first, last) = (first.min(x.log10()), last.max(x.log10()));
    }
    let mut svg = opening(title);
    if low.is_infinite() {
        return svg + "</svg>\n";
    }
    high = high.max(low + 1.0);
    last = last.max(first + 1e-6);
    let place_x = |x: f64| LEFT + (x.log10() - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    let place_y = |y: f64| HEIGHT - BOTTOM - (y.log10() - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    let mut exponent = low;
    while exponent <= high {
        let (value, y) = (10_f64.powf(exponent), place_y(10_f64.powf(exponent)));
        let _ = writeln!(svg, r##"<path d="M{LEFT} {y:.1}H{}" stroke="#ddd"/>"##, WIDTH - RIGHT);
        text(&mut svg, (LEFT - 6.0, y + 4.0), "end", &short(value));
        exponent += 1.0;
    }
    let mut ticks: Vec<f64> = points().map(|(x, _)| *x).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    for tick in ticks {
        text(&mut svg, (place_x(tick), HEIGHT - BOTTOM + 16.0), "middle", &short(tick));
    }
    text(&mut svg, ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0), "middle", across);
    let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
    let _ = writeln!(
        svg,
        r#"<text x="16" y="{middle:.1}" text-anchor="middle" transform="rotate(-90 16 {middle:.1})">{up}</text>"#
    );
    for (index, ((name, points), colour)) in (0_u32..).zip(lines.iter().zip(COLOURS.iter().cycle())) {
        let points: Vec<String> = points
            .iter()
            .filter(|(_, y)| *y > 0.0)
            .map(|(x, y)| format!("{:.1},{:.1}", place_x(*x), place_y(*y)))
            .collect();
        let width = if index == 0 { 3 } else { 1 };
        let path = points.join(" ");
        let _ = writeln!(
            svg,
            r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>"#
        );
        let y = TOP + 6.0 + f64::from(index) * 20.0;
        let x = WIDTH - RIGHT + 16.0;
        let _ = writeln!(svg, r#"<path d="M{x} {y}h18" stroke="{colour}" stroke-width="{width}"/>"#);
        text(&mut svg, (x + 24.0, y + 4.0), "start", name);
    }
    svg + "</svg>\n"
}

/// A bar chart from zero, the best value first, with the value behind each bar and a title below.
#[must_use]
pub(super) fn bars(title: &str, across: &str, best: Best, bars: &[(String, f64, String)]) -> String {
    const NAMES: f64 = 210.0;
    let mut bars = bars.to_vec();
    bars.sort_by(|(_, one, _), (_, other, _)| match best {
        Best::Lowest => one.total_cmp(other),
        Best::Highest => other.total_cmp(one),
    });
    let most = bars.iter().map(|(_, value, _)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = opening(title);
    let step = (HEIGHT - TOP - 30.0) / f64::from(u32::try_from(bars.len()).unwrap_or(1).max(1));
    for (index, (name, value, shown)) in (0_u32..).zip(&bars) {
        let y = TOP + f64::from(index) * step;
        let width = value / most * (WIDTH - NAMES - 110.0);
        let colour = if name.starts_with("leasehold") { COLOURS[0] } else { COLOURS[1] };
        let height = (step * 0.7).min(24.0);
        text(&mut svg, (NAMES - 8.0, y + height * 0.7), "end", name);
        let _ = writeln!(
            svg,
            r#"<rect x="{NAMES}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{colour}"/>"#
        );
        text(&mut svg, (NAMES + width + 6.0, y + height * 0.7), "start", shown);
    }
    text(&mut svg, ((NAMES + WIDTH) / 2.0, HEIGHT - 8.0), "middle", across);
    svg + "</svg>\n"
}

/// The head of a chart. Its background is white, so that it is readable on a dark page.
fn opening(title: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    text(&mut svg, (WIDTH / 2.0, 22.0), "middle", title);
    svg
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{words}</text>"#);
}

fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e3 => format!("{}k", v / 1e3),
        v => format!("{}", (v * 1e4).round() / 1e4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_and_every_bar_is_drawn_and_labelled_and_axes_have_titles() {
        let both =
            [("a<b".to_owned(), vec![(2.0, 10.0), (1_000.0, 5.0)]), ("c".to_owned(), vec![(2.0, 0.0)])];
        let svg = lines("title", "clients", "acquisitions/s", &both);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains(">clients<") && svg.contains(">acquisitions/s<"));
        assert!(svg.contains("a&lt;b") && svg.contains(">1k<") && !svg.contains("NaN"));
        let svg = bars("title", "µs", Best::Lowest, &[("leasehold".to_owned(), 2.0, "2 µs".to_owned())]);
        assert_eq!(svg.matches(COLOURS[0]).count(), 1);
        assert!(svg.contains(">µs<"));
    }

    #[test]
    fn bars_are_sorted_with_the_best_value_first() {
        let all = [("slow".to_owned(), 9.0, String::new()), ("fast".to_owned(), 1.0, String::new())];
        let is_first = |svg: &str, name: &str| {
            let other = if name == "slow" { "fast" } else { "slow" };
            svg.find(&format!(">{name}<")).unwrap() < svg.find(&format!(">{other}<")).unwrap()
        };
        assert!(is_first(&bars("", "", Best::Lowest, &all), "fast"));
        assert!(is_first(&bars("", "", Best::Highest, &all), "slow"));
    }

    #[test]
    fn a_chart_without_data_is_valid() {
        assert!(!lines("title", "clients", "rate", &[]).contains("NaN"));
        assert!(bars("title", "", Best::Lowest, &[]).ends_with("</svg>\n"));
    }
}
