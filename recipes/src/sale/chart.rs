//! The runs as charts: the distribution of the latencies, and the rates as bars.

use std::fmt::Write as _;
use std::time::Duration;

use super::Contender;
use super::summary::{Row, sorted, span};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 320.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 64.0;

/// The time axis spans a millisecond to 100 seconds, logarithmically.
const DECADES: f64 = 5.0;

const OWN_COLOR: &str = "#0a6b3d";
const COLORS: [&str; 6] = ["#b3261e", "#c77700", "#6b4fa0", "#3a6ea5", "#7a6a53", "#555f6b"];

fn x_of(time: Duration) -> f64 {
    let decades = (time.as_secs_f64() * 1_000.0).max(1.0).log10().min(DECADES);
    LEFT + decades / DECADES * (WIDTH - LEFT - RIGHT)
}

fn y_of(part: f64) -> f64 {
    HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
}

fn color(row: &Row, number: usize) -> &'static str {
    if row.contender == Contender::Leasehold { OWN_COLOR } else { COLORS[number % COLORS.len()] }
}

/// The share of requests completed within a time, for each lock with this many services. The legend is sorted by rate.
#[must_use]
pub fn latencies(rows: &[Row], services: usize, clients: usize) -> String {
    let mut body = String::new();
    let title = format!("Latency of a sale with {clients} concurrent clients; services: {services}");
    text(&mut body, (LEFT, 20.0), "start", "font-weight=\"bold\"", &title);
    axes(&mut body);
    let rows = sorted(rows).into_iter().filter(|row| row.services == services);
    for (number, row) in rows.enumerate() {
        let color = color(row, number);
        let thick = if row.contender == Contender::Leasehold { 3 } else { 2 };
        let points: Vec<_> = (0..=200).map(|step| point(row, step)).collect();
        let points = points.join(" ");
        let _ = writeln!(
            body,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{thick}\"/>"
        );
        let result = &row.median().result;
        let failed = if result.failed > 0 { format!(", {} failed", result.failed) } else { String::new() };
        let words = format!("{}, p99 {}{failed}", row.contender, span(result.quantile(990)));
        #[allow(clippy::cast_precision_loss, reason = "a few lines")]
        let y = TOP + 20.0 * number as f64;
        text(&mut body, (WIDTH - RIGHT + 16.0, y), "start", &format!("fill=\"{color}\""), &words);
    }
    document(HEIGHT, &body)
}

/// The rate of each lock with this many services as a bar, the highest first.
#[must_use]
pub fn rates(rows: &[Row], services: usize, clients: usize) -> String {
    const NAMES: f64 = 240.0;
    const STEP: f64 = 34.0;
    let rows: Vec<_> = sorted(rows).into_iter().filter(|row| row.services == services).collect();
    let most = rows.iter().map(|row| row.median().result.rate()).fold(f64::MIN_POSITIVE, f64::max);
    let driver = rows.first().map_or("", |row| row.median().result.driver);
    let mut body = String::new();
    let title =
        format!("Sales per second with {clients} concurrent clients; services: {services}, driver: {driver}");
    text(&mut body, (NAMES, 20.0), "start", "font-weight=\"bold\"", &title);
    let mut y = TOP;
    for (number, row) in rows.iter().enumerate() {
        let (rate, color) = (row.median().result.rate(), color(row, number));
        let (low, high) = row.range();
        let width = rate / most * (WIDTH - NAMES - 200.0);
        text(&mut body, (NAMES - 8.0, y + 16.0), "end", "", &row.contender.to_string());
        let _ = writeln!(
            body,
            "<rect x=\"{NAMES}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"22\" fill=\"{color}\"/>"
        );
        let words = format!("{rate:.0} ({low:.0} to {high:.0})");
        text(&mut body, (NAMES + width + 6.0, y + 16.0), "start", "", &words);
        y += STEP;
    }
    text(&mut body, (NAMES, y + 14.0), "start", "", "sales per second, median (lowest to highest)");
    document(y + 30.0, &body)
}

fn document(height: f64, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\">\n\
         <style>text{{font:12px sans-serif}}</style>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

fn text(body: &mut String, (x, y): (f64, f64), anchor: &str, attributes: &str, words: &str) {
    let _ = writeln!(
        body,
        "<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"{anchor}\" {attributes}>{words}</text>"
    );
}

fn point(row: &Row, step: u32) -> String {
    let time = row.median().result.quantile(usize::try_from(step * 5).unwrap_or(0));
    format!("{:.1},{:.1}", x_of(time), y_of(f64::from(step) / 200.0))
}

fn axes(body: &mut String) {
    let (bottom, top) = (y_of(0.0), y_of(1.0));
    for (decade, label) in ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s"].iter().enumerate() {
        let exponent = i32::try_from(decade).unwrap_or(0) - 3;
        let x = x_of(Duration::from_secs_f64(10_f64.powi(exponent)));
        let _ = writeln!(
            body,
            "<line x1=\"{x:.0}\" y1=\"{top:.0}\" x2=\"{x:.0}\" y2=\"{bottom:.0}\" stroke=\"#ddd\"/>"
        );
        text(body, (x, bottom + 18.0), "middle", "", label);
    }
    for percent in [0, 50, 90, 100] {
        let y = y_of(f64::from(percent) / 100.0);
        let right = WIDTH - RIGHT;
        let _ = writeln!(
            body,
            "<line x1=\"{LEFT}\" y1=\"{y:.0}\" x2=\"{right}\" y2=\"{y:.0}\" stroke=\"#ddd\"/>"
        );
        text(body, (LEFT - 8.0, y), "end", "", &format!("{percent} %"));
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    text(body, (middle, bottom + 42.0), "middle", "", "time until the response (logarithmic)");
    let y = y_of(0.5);
    let turned = format!("transform=\"rotate(-90 18 {y:.0})\"");
    text(body, (18.0, y), "middle", &turned, "share of the requests");
}

#[cfg(test)]
mod tests {
    use super::super::Retry;
    use super::super::summary::tests::row;
    use super::*;

    fn rows() -> [Row; 2] {
        let recipe = Contender::Recipe { id: "set-nx-px", retry: Retry::Yield };
        [row(recipe, &[4.0, 10.0]), row(Contender::Leasehold, &[0.5])]
    }

    #[test]
    fn bars_are_sorted_and_labelled_with_name_rate_and_range() {
        let svg = rates(&rows(), 1, 1_000);
        assert_eq!(svg.matches("height=\"22\"").count(), 2);
        assert!(svg.find(">leasehold<").unwrap() < svg.find(">set-nx-px, yield<").unwrap());
        assert!(svg.contains("250 (100 to 250)") && svg.contains("1000 concurrent clients"), "{svg}");
        assert!(svg.contains("sales per second, median"));
    }

    #[test]
    fn both_axes_of_the_latencies_have_a_title() {
        let svg = latencies(&rows(), 1, 1_000);
        assert!(svg.contains("time until the response") && svg.contains("share of the requests"));
        assert_eq!(svg.matches("<polyline").count(), 2);
    }
}
