//! A schedule, as people read it: a column for each client.

use std::fmt::Write as _;

use crate::explorer::{Check, Event, NAMES, Violation};
use crate::recipe::Role;

/// How wide a column of text is.
const WIDTH: usize = 40;

/// What the schedule has come to, in a sentence.
#[must_use]
pub fn ending(check: Check) -> &'static str {
    match check {
        Check::OneHolder => "Two clients hold it at once, and the leases of both run.",
        Check::KnowsItsEnd => {
            "One client's lease has passed, it does not know that, and another one is in the critical section with it."
        }
        Check::FreeAgain => "It stays locked, though nobody is left.",
        Check::FreesOnlyOwn => "That freed what another client holds: somebody else gets it at once.",
        Check::CanRelease => "Its lease still runs, and what it holds can't be released.",
        Check::NothingLeft => "Nobody holds it, nobody has died, and nobody can have it.",
        Check::Woken => "Nobody holds it, and yet somebody waits for word.",
        Check::Fenced => "The token does not rise.",
    }
}

/// The clients that take part, in the order of their columns.
fn columns(events: &[Event]) -> Vec<usize> {
    let mut who: Vec<_> = events.iter().filter_map(|event| event.who).collect();
    who.sort_unstable();
    who.dedup();
    who
}

/// A client's name, and what it came for where that differs.
fn head(violation: &Violation, who: usize) -> String {
    let name = NAMES[who];
    match violation.roles.get(who) {
        None => format!("{name}, who comes to see"),
        Some(_) if !violation.roles.contains(&Role::Reader) => name.to_owned(),
        Some(Role::Reader) => format!("{name}, a reader"),
        Some(Role::Writer) => format!("{name}, a writer"),
    }
}

/// What stands in a client's column, line by line.
fn lines(event: &Event) -> Vec<String> {
    let said = match &event.reply {
        Some(reply) => format!("{} → {}", shortened(&event.said), shortened(reply)),
        None => event.said.clone(),
    };
    let notes = event.notes.iter().map(|note| format!("▸ {note}"));
    wrapped(&said).into_iter().chain(notes).collect()
}

/// Long words tell people nothing.
fn shortened(text: &str) -> String {
    let words = text.split(' ').map(|word| match word.char_indices().nth(22) {
        Some((cut, _)) => format!("{}…", &word[..cut]),
        None => word.to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is one");
        if last.is_empty() {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() < WIDTH {
            let _ = write!(last, " {word}");
        } else {
            lines.push(format!("  {word}"));
        }
    }
    lines
}

/// As text, to be read in a terminal.
#[must_use]
pub fn text(violation: &Violation) -> String {
    let columns = columns(&violation.events);
    let mut out = String::new();
    let row = |cells: &[&str]| {
        let padded = cells.iter().map(|cell| format!("{cell:WIDTH$}"));
        padded.collect::<String>().trim_end().to_owned()
    };
    let heads: Vec<_> = columns.iter().map(|who| head(violation, *who)).collect();
    let _ = writeln!(out, "{}", row(&heads.iter().map(String::as_str).collect::<Vec<_>>()));
    for event in &violation.events {
        let Some(who) = event.who else {
            let _ = writeln!(out, "    ··· {} ···", event.said);
            continue;
        };
        for line in lines(event) {
            let cells: Vec<_> =
                columns.iter().map(|column| if *column == who { &*line } else { "" }).collect();
            let _ = writeln!(out, "{}", row(&cells));
        }
    }
    let _ = writeln!(out, "{}", ending(violation.check));
    out
}

const COLUMN: usize = 300;
const LINE: usize = 18;
const MARGIN: usize = 16;

/// As a picture.
#[must_use]
pub fn svg(title: &str, violation: &Violation) -> String {
    let columns = columns(&violation.events);
    // Narrow schedules leave room for their titles.
    let width = 2 * MARGIN + COLUMN * columns.len().max(2);
    let mut body = String::new();
    let mut y = MARGIN + LINE;
    let _ = writeln!(body, "<text x=\"{MARGIN}\" y=\"{y}\" class=\"title\">{}</text>", escaped(title));
    y += LINE + 8;
    let top = y;
    for (column, who) in columns.iter().enumerate() {
        let x = MARGIN + column * COLUMN;
        let name = head(violation, *who);
        let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" class=\"who\">{name}</text>");
    }
    y += 8;
    for event in &violation.events {
        y += 6;
        match event.who {
            None => {
                y += LINE;
                let wide = width - 2 * MARGIN;
                let (box_y, middle) = (y - 14, width / 2);
                let _ = writeln!(
                    body,
                    "<rect x=\"{MARGIN}\" y=\"{box_y}\" width=\"{wide}\" height=\"{LINE}\" class=\"world\"/>"
                );
                let said = escaped(&event.said);
                let _ = writeln!(body, "<text x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\">{said}</text>");
            }
            Some(who) => {
                let column = columns.iter().position(|known| *known == who).unwrap_or(0);
                let x = MARGIN + column * COLUMN;
                for line in lines(event) {
                    y += LINE;
                    let class = class_of(&line);
                    let _ = writeln!(
                        body,
                        "<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{}</text>",
                        escaped(&line)
                    );
                }
            }
        }
    }
    let bottom = y + 8;
    for column in 0..columns.len() {
        let x = MARGIN + column * COLUMN - 6;
        let _ = writeln!(body, "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{bottom}\"/>");
    }
    y = bottom;
    let words = ending(violation.check);
    for part in wrapped_to(words, width / 8) {
        y += LINE;
        let _ = writeln!(body, "<text x=\"{MARGIN}\" y=\"{y}\" class=\"end\">{}</text>", escaped(&part));
    }
    let height = y + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <style>text{{font:12px ui-monospace,monospace;fill:#1c2733}}.title{{font-weight:bold;font-size:13px}}\
         .who{{font-weight:bold}}.note{{fill:#0a6b3d;font-weight:bold}}.bad,.end{{fill:#b3261e;font-weight:bold}}\
         .world{{fill:#f1ead8}}line{{stroke:#9aa5b1}}.page{{fill:#fff}}</style>\n\
         <rect width=\"{width}\" height=\"{height}\" class=\"page\"/>\n{body}</svg>\n"
    )
}

fn class_of(line: &str) -> &'static str {
    if line.contains("could not") || line.contains("does not get") || line.starts_with("dies") {
        "bad"
    } else if line.starts_with('▸') {
        "note"
    } else {
        "said"
    }
}

fn wrapped_to(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(last) if last.len() + word.len() < width => {
                let _ = write!(last, " {word}");
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// As a page that needs nothing else.
#[must_use]
pub fn html(title: &str, pictures: &[String]) -> String {
    let title = escaped(title);
    let pictures = pictures.concat();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title></head>\n\
         <body style=\"font-family:sans-serif\"><h1>{title}</h1>\n{pictures}</body></html>\n"
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
