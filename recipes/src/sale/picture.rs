//! How long customers waited, as a picture: which part of the requests was over within which time.

use std::fmt::Write as _;
use std::time::Duration;

use super::Contender;
use super::contest::{Row, span};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 320.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;

/// From a millisecond to a minute, by tens.
const DECADES: f64 = 5.0;

const COLORS: [&str; 6] = ["#b3261e", "#c77700", "#6b4fa0", "#3a6ea5", "#7a6a53", "#555f6b"];

fn x_of(time: Duration) -> f64 {
    let decades = (time.as_secs_f64() * 1_000.0).max(1.0).log10().min(DECADES);
    LEFT + decades / DECADES * (WIDTH - LEFT - RIGHT)
}

fn y_of(part: f64) -> f64 {
    HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
}

/// The runs with so many services.
#[must_use]
pub fn svg(rows: &[Row], services: usize) -> String {
    let mut body = axes(services);
    let mut next_color = COLORS.iter().cycle();
    for (line, row) in rows.iter().filter(|row| row.services == services).enumerate() {
        let is_own = row.contender == Contender::Leasehold;
        let color = if is_own { "#0a6b3d" } else { next_color.next().unwrap_or(&"#000") };
        let thick = if is_own { 3 } else { 2 };
        let points: Vec<_> = (0..=200).map(|step| point(row, step)).collect();
        let points = points.join(" ");
        let _ = writeln!(
            body,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{thick}\"/>"
        );
        #[allow(clippy::cast_precision_loss, reason = "a few lines")]
        let y = TOP + 20.0 * line as f64;
        let x = WIDTH - RIGHT + 16.0;
        let failed =
            if row.seen.failed > 0 { format!(", {} failed", row.seen.failed) } else { String::new() };
        let words = format!("{}, p99 {}{failed}", row.contender, span(row.seen.quantile(990)));
        let _ = writeln!(body, "<text x=\"{x:.0}\" y=\"{y:.0}\" fill=\"{color}\">{words}</text>");
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\">\n\
         <style>text{{font:12px sans-serif}}</style>\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

fn point(row: &Row, step: u32) -> String {
    let time = row.seen.quantile(usize::try_from(step * 5).unwrap_or(0));
    format!("{:.1},{:.1}", x_of(time), y_of(f64::from(step) / 200.0))
}

fn axes(services: usize) -> String {
    let mut body = String::new();
    let _ = writeln!(
        body,
        "<text x=\"{LEFT}\" y=\"20\" font-weight=\"bold\">Requests that were over within a time; services: {services}</text>"
    );
    let (bottom, top) = (y_of(0.0), y_of(1.0));
    for (decade, label) in ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s"].iter().enumerate() {
        let exponent = i32::try_from(decade).unwrap_or(0) - 3;
        let x = x_of(Duration::from_secs_f64(10_f64.powi(exponent)));
        let _ = writeln!(
            body,
            "<line x1=\"{x:.0}\" y1=\"{top:.0}\" x2=\"{x:.0}\" y2=\"{bottom:.0}\" stroke=\"#ddd\"/>"
        );
        let y = bottom + 18.0;
        let _ = writeln!(body, "<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"middle\">{label}</text>");
    }
    for percent in [0, 50, 90, 100] {
        let y = y_of(f64::from(percent) / 100.0);
        let (right, x) = (WIDTH - RIGHT, LEFT - 8.0);
        let _ = writeln!(
            body,
            "<line x1=\"{LEFT}\" y1=\"{y:.0}\" x2=\"{right}\" y2=\"{y:.0}\" stroke=\"#ddd\"/>"
        );
        let _ = writeln!(body, "<text x=\"{x}\" y=\"{y:.0}\" text-anchor=\"end\">{percent} %</text>");
    }
    body
}
