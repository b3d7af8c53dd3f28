//! A schedule as text or as a picture, with one column for each client.

use std::fmt::Write as _;

use crate::explorer::{Check, Event, NAMES, Violation};
use crate::recipe::Role;

/// Width of a text column, in characters.
const WIDTH: usize = 40;

/// Marks the step that breaks the check.
const FATAL: &str = "✗ ";

/// The result of the schedule, in a sentence.
#[must_use]
pub fn ending(check: Check) -> &'static str {
    match check {
        Check::OneHolder => "Two clients hold the lock, and the leases of both run.",
        Check::DetectsExpiry => {
            "A holder whose lease has expired does not notice it, and another client is in the critical section."
        }
        Check::FreeAgain => "The lock stays locked although every client has crashed.",
        Check::FreesOnlyOwn => "The step freed another client's lock: a new client acquires it at once.",
        Check::CanRelease => "The holder's lease still runs, but its release fails.",
        Check::NoStaleLock => "No client holds the lock and none has crashed, but it cannot be acquired.",
        Check::WaitersWoken => "The lock is free, but a client still waits for a notification.",
        Check::TokensIncrease => "The fencing token does not increase.",
    }
}

/// The clients that take part, in the order of their columns.
fn columns(events: &[Event]) -> Vec<usize> {
    let mut who: Vec<_> = events.iter().filter_map(|event| event.who).collect();
    who.sort_unstable();
    who.dedup();
    who
}

/// A client's name, with its role where the roles differ.
fn head(violation: &Violation, who: usize) -> String {
    let name = NAMES[who];
    match violation.roles.get(who) {
        None => format!("client {name}, the probe"),
        Some(_) if !violation.roles.contains(&Role::Reader) => format!("client {name}"),
        Some(Role::Reader) => format!("client {name}, a reader"),
        Some(Role::Writer) => format!("client {name}, a writer"),
    }
}

/// An event's lines in its client's column.
fn lines(event: &Event, is_fatal: bool) -> Vec<String> {
    let mark = if is_fatal { FATAL } else { "" };
    let action = match &event.reply {
        Some(reply) => format!("{mark}{} → {}", shortened(&event.action), shortened(reply)),
        None => format!("{mark}{}", event.action),
    };
    let notes = event.notes.iter().map(|note| format!("▸ {note}"));
    wrapped(&action).into_iter().chain(notes).collect()
}

/// Cuts words that are too long for a column.
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

/// The schedule as text for a terminal. `✗` marks the step that breaks the check.
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
    for (number, event) in violation.events.iter().enumerate() {
        let is_fatal = number == violation.fatal;
        let Some(who) = event.who else {
            let mark = if is_fatal { FATAL } else { "" };
            let _ = writeln!(out, "    ··· {mark}{} ···", event.action);
            continue;
        };
        for line in lines(event, is_fatal) {
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

/// The schedule as an SVG picture. The step that breaks the check is red.
#[must_use]
pub fn svg(title: &str, violation: &Violation) -> String {
    let columns = columns(&violation.events);
    // A title needs the width of two columns.
    let width = 2 * MARGIN + COLUMN * columns.len().max(2);
    let mut picture = Picture { body: String::new(), y: MARGIN + LINE, width };
    picture.text(MARGIN, "title", title);
    picture.y += LINE + 8;
    let top = picture.y;
    for (column, who) in columns.iter().enumerate() {
        picture.text(MARGIN + column * COLUMN, "client", &head(violation, *who));
    }
    picture.y += 8;
    for (number, event) in violation.events.iter().enumerate() {
        picture.event(event, number == violation.fatal, &columns);
    }
    let bottom = picture.y + 8;
    for column in 0..columns.len() {
        let x = MARGIN + column * COLUMN - 6;
        let _ = writeln!(picture.body, "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{bottom}\"/>");
    }
    picture.y = bottom;
    for part in wrapped_to(ending(violation.check), width / 8) {
        picture.y += LINE;
        picture.text(MARGIN, "fatal", &part);
    }
    let (height, body) = (picture.y + MARGIN, picture.body);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <style>text{{font:12px ui-monospace,monospace;fill:#1c2733}}.title{{font-weight:bold;font-size:13px}}\
         .client{{font-weight:bold}}.note{{fill:#0a6b3d;font-weight:bold}}.fatal,.bad{{fill:#b3261e;font-weight:bold}}\
         .environment{{fill:#f1ead8}}.fatalbox{{fill:#fbe3e1}}line{{stroke:#9aa5b1}}.page{{fill:#fff}}</style>\n\
         <rect width=\"{width}\" height=\"{height}\" class=\"page\"/>\n{body}</svg>\n"
    )
}

/// A picture that grows downwards.
struct Picture {
    body: String,
    /// The baseline of the last line.
    y: usize,
    width: usize,
}

impl Picture {
    fn text(&mut self, x: usize, class: &str, text: &str) {
        let (y, text) = (self.y, escaped(text));
        let _ = writeln!(self.body, "<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{text}</text>");
    }

    /// A background behind the line at `y`.
    fn background(&mut self, x: usize, width: usize, class: &str) {
        let y = self.y - 14;
        let _ = writeln!(
            self.body,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{LINE}\" class=\"{class}\"/>"
        );
    }

    fn event(&mut self, event: &Event, is_fatal: bool, columns: &[usize]) {
        self.y += 6;
        let Some(who) = event.who else {
            self.y += LINE;
            let (class, text_class) =
                if is_fatal { ("fatalbox", "fatal") } else { ("environment", "action") };
            self.background(MARGIN, self.width - 2 * MARGIN, class);
            let (y, middle, action) = (self.y, self.width / 2, escaped(&event.action));
            let _ = writeln!(
                self.body,
                "<text x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\" class=\"{text_class}\">{action}</text>"
            );
            return;
        };
        let column = columns.iter().position(|known| *known == who).unwrap_or(0);
        let x = MARGIN + column * COLUMN;
        for line in lines(event, is_fatal) {
            self.y += LINE;
            if is_fatal {
                self.background(x - 3, COLUMN - 6, "fatalbox");
            }
            self.text(x, if is_fatal { "fatal" } else { class_of(&line) }, &line);
        }
    }
}

fn class_of(line: &str) -> &'static str {
    if line.contains("cannot release") || line.contains("does not acquire") || line.starts_with("crashes") {
        "bad"
    } else if line.starts_with('▸') {
        "note"
    } else {
        "action"
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

/// Several pictures as one HTML page without external files.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_step_that_breaks_the_check_is_marked_and_red() {
        let event = |who, action: &str| Event {
            who,
            action: action.to_owned(),
            reply: Some("1".to_owned()),
            notes: Vec::new(),
        };
        let violation = Violation {
            check: Check::FreesOnlyOwn,
            roles: vec![Role::Writer; 2],
            events: vec![
                event(Some(0), "SETNX lock 1"),
                event(Some(1), "DEL lock"),
                event(Some(3), "GET lock"),
            ],
            fatal: 1,
            follows: None,
            is_confirmed: true,
        };
        let text = text(&violation);
        assert!(text.contains("✗ DEL lock → 1") && text.matches('✗').count() == 1, "{text}");
        let svg = svg("a title", &violation);
        let red: Vec<_> = svg.lines().filter(|line| line.contains("class=\"fatal\"")).collect();
        assert_eq!(red.len(), 2, "{red:?}");
        assert!(red[0].contains("DEL lock") && red[1].contains("freed another client"), "{red:?}");
        for name in ["client A", "client B", "client Z, the probe"] {
            assert!(svg.contains(name), "{svg}");
        }
    }
}
