//! The worst moment of a run as a picture: who waited, who believed to hold the lock, which faults there were.

use std::fmt::Write as _;

use crate::check::{Check, Finding};
use crate::history::{History, Ns};

const WIDTH: f64 = 1_100.0;
const LEFT: f64 = 90.0;
const ROW: f64 = 26.0;
const TOP: f64 = 60.0;
/// The time before and after the worst moment.
const AROUND: Ns = 500_000_000;

/// What is shown.
struct Window {
    from: Ns,
    to: Ns,
    title: String,
}

impl Window {
    fn x(&self, at: Ns) -> f64 {
        let part = at.clamp(self.from, self.to) - self.from;
        LEFT + (WIDTH - LEFT - 10.0) * lossy(part) / lossy((self.to - self.from).max(1))
    }

    fn shows(&self, from: Ns, to: Ns) -> bool {
        from < self.to && to > self.from
    }
}

#[expect(clippy::cast_precision_loss, reason = "a picture has fewer pixels")]
fn lossy(number: u64) -> f64 {
    number as f64
}

/// Draws it as SVG.
#[must_use]
pub fn draw(history: &History, title: &str, findings: &[Finding]) -> String {
    let window = worst(history, title, findings);
    let tasks = history.waiting.iter().map(|waiting| waiting.task + 1).max().unwrap_or(1);
    let height = TOP + ROW * f64::from(tasks) + 40.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"10\" y=\"20\" font-size=\"14\">{}</text>\n",
        escape(&window.title)
    );
    draw_faults(&mut svg, history, &window, height);
    for task in 0..tasks {
        let _ = writeln!(svg, "<text x=\"10\" y=\"{:.1}\">task {task}</text>", middle(task) + 4.0);
    }
    draw_waiting(&mut svg, history, &window);
    draw_sections(&mut svg, history, &window);
    draw_axis(&mut svg, history, &window, height);
    svg + "</svg>\n"
}

/// A violation first, then an exempt overlap or a stale write, then the longest stall, else the end.
fn worst(history: &History, title: &str, findings: &[Finding]) -> Window {
    let of = |is_exempt: bool| findings.iter().find(|finding| finding.is_exempt == is_exempt);
    let Some(finding) = of(false).or_else(|| of(true)) else {
        let middle = history.faults.first().map_or(history.start, |injected| injected.start);
        let (from, to) = (middle.saturating_sub(AROUND), middle + 4 * AROUND);
        return Window { from, to, title: format!("{title}: the first fault") };
    };
    // Of these the cause is before.
    let before = match finding.check {
        Check::StaleFenced | Check::StaleUnfenced | Check::Loss | Check::Failure => 4 * AROUND,
        _ => AROUND,
    };
    Window {
        from: finding.from.saturating_sub(before),
        to: finding.to.max(finding.from) + AROUND,
        title: format!("{title}: {}", finding.text),
    }
}

fn middle(task: u32) -> f64 {
    TOP + ROW * (f64::from(task) + 0.5)
}

fn draw_faults(svg: &mut String, history: &History, window: &Window, height: f64) {
    for injected in &history.faults {
        // An instant is shown too.
        let healed = injected.healed.max(injected.start + 1_000_000);
        if !window.shows(injected.start, healed) {
            continue;
        }
        let (left, right) = (window.x(injected.start), window.x(healed));
        let rows: Vec<(f64, f64)> = if injected.tasks.is_empty() {
            vec![(TOP, height - 40.0)]
        } else {
            injected.tasks.iter().map(|task| (middle(*task) - ROW / 2.0, middle(*task) + ROW / 2.0)).collect()
        };
        for (top, bottom) in rows {
            let _ = writeln!(
                svg,
                "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#f6d5d0\"/>",
                (right - left).max(1.5),
                bottom - top
            );
        }
        let text = escape(&format!("{} {}", injected.fault.name(), injected.target));
        let _ = writeln!(svg, "<text x=\"{left:.1}\" y=\"{:.1}\" fill=\"#a33\">{text}</text>", TOP - 10.0);
    }
}

fn draw_waiting(svg: &mut String, history: &History, window: &Window) {
    for waiting in &history.waiting {
        let to = waiting.to.unwrap_or(history.end);
        if window.shows(waiting.from, to) {
            let (left, right, y) = (window.x(waiting.from), window.x(to), middle(waiting.task));
            let _ = writeln!(
                svg,
                "<line x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#999\" stroke-dasharray=\"3 3\"/>"
            );
        }
    }
}

fn draw_sections(svg: &mut String, history: &History, window: &Window) {
    for section in &history.sections {
        let end = section.end.unwrap_or(history.end);
        if !window.shows(section.begin, end) {
            continue;
        }
        let (y, color) = (middle(section.task) - 8.0, if section.is_lost { "#d08000" } else { "#2f6fb0" });
        for (to, opacity) in [(end, 0.3), (section.last_held, 1.0)] {
            let (left, right) = (window.x(section.begin), window.x(to));
            let _ = writeln!(
                svg,
                "<rect x=\"{left:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"16\" fill=\"{color}\" fill-opacity=\"{opacity}\">\
                 <title>token {}</title></rect>",
                (right - left).max(1.0),
                section.token
            );
        }
        if let Some(write) = section.write.filter(|write| window.shows(write.arrived, write.arrived + 1)) {
            let color = if write.is_accepted { "#111" } else { "#d00" };
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{color}\"/>",
                window.x(write.arrived),
                y + 8.0
            );
        }
    }
}

fn draw_axis(svg: &mut String, history: &History, window: &Window, height: f64) {
    const MARKS: u64 = 8;
    for mark in 0..=MARKS {
        let at = window.from + (window.to - window.from) * mark / MARKS;
        let x = window.x(at);
        let ms = at.saturating_sub(history.start) / 1_000_000;
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"end\">{ms} ms</text>",
            height - 40.0,
            height - 26.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"10\" y=\"{:.1}\">blue: holds the lock by its own belief, pale until its release; orange: lost; dashed: waits; \
         dot: write, red if the fence refused it; pink: fault</text>",
        height - 8.0
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
