//! `doctor`: what is dangerous for locks about a store, and how to set it.

use std::fmt::Write as _;

use leasehold::{Examination, Finding, Severity, Subject};
use serde_json::{Map, Value, json};

use crate::args::{DoctorArgs, print};
use crate::exit::{Exit, Stop};
use crate::look::{print_json, printable};
use crate::store;

pub(crate) async fn doctor(url: Option<String>, args: DoctorArgs) -> Result<Exit, Stop> {
    let client = store::connect_quietly(url).await?;
    let examination = client.examine().await?;
    if args.json {
        print_json(&to_json(&examination))?;
    } else {
        print(text(&examination).as_bytes())?;
    }
    Ok(if examination.is_dangerous() { Exit::Danger } else { Exit::Success })
}

// --- As text -------------------------------------------------------------------------------------

/// The worst first, each once with all that it is about; then what was seen of each.
fn text(examination: &Examination) -> String {
    let mut text = String::new();
    for (finding, names) in grouped(examination) {
        let (word, about) = (finding.severity.to_string(), names.join(", "));
        let _ = writeln!(text, "{word:<8}{} ({})", printable(&finding.what), printable(&about));
        if finding.severity != Severity::Fine {
            for line in wrapped(&printable(&finding.why)) {
                let _ = writeln!(text, "        {line}");
            }
        }
        if let Some(remedy) = &finding.remedy {
            let _ = writeln!(text, "        > {}", printable(remedy));
        }
    }
    for subject in &examination.subjects {
        let _ = writeln!(text, "\n{}", printable(&subject.name));
        let width = subject.facts.iter().map(|fact| fact.name.len()).max().unwrap_or(0);
        for fact in &subject.facts {
            let _ = writeln!(text, "  {:<width$}  {}", fact.name, printable(&fact.value));
        }
    }
    if remedies(examination).any(|remedy| remedy.starts_with("CONFIG SET")) {
        text += "\nCONFIG SET lasts until the server restarts; CONFIG REWRITE writes it into its file.\n";
    }
    text
}

fn remedies(examination: &Examination) -> impl Iterator<Item = &str> {
    let findings = examination.subjects.iter().flat_map(|subject| &subject.findings);
    findings.filter_map(|finding| finding.remedy.as_deref())
}

/// Servers of one store are set up alike, so most findings are about several of them.
fn grouped(examination: &Examination) -> Vec<(&Finding, Vec<&str>)> {
    let mut groups: Vec<(&Finding, Vec<&str>)> = Vec::new();
    for subject in &examination.subjects {
        for finding in &subject.findings {
            match groups.iter_mut().find(|(known, _)| *known == finding) {
                Some((_, names)) => names.push(&subject.name),
                None => groups.push((finding, vec![&subject.name])),
            }
        }
    }
    groups.sort_by_key(|(finding, _)| finding.severity);
    groups
}

/// How long a line of prose is.
const LINE: usize = 92;

fn wrapped(prose: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in prose.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= LINE => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

// --- As JSON -------------------------------------------------------------------------------------

fn to_json(examination: &Examination) -> Value {
    json!({
        "dangerous": examination.is_dangerous(),
        "subjects": examination.subjects.iter().map(subject_json).collect::<Vec<_>>(),
    })
}

fn subject_json(subject: &Subject) -> Value {
    let facts: Map<String, Value> =
        subject.facts.iter().map(|fact| (fact.name.to_owned(), json!(fact.value))).collect();
    json!({
        "name": subject.name,
        "facts": facts,
        "findings": subject.findings.iter().map(finding_json).collect::<Vec<_>>(),
    })
}

fn finding_json(finding: &Finding) -> Value {
    json!({
        "severity": finding.severity.to_string(),
        "what": finding.what,
        "why": finding.why,
        "remedy": finding.remedy,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_wrapped_between_words() {
        let lines = wrapped(&"a word ".repeat(30));
        assert!(lines.len() == 3 && lines.iter().all(|line| line.len() <= LINE), "{lines:?}");
        assert_eq!(lines.join(" "), "a word ".repeat(30).trim_end());
    }
}
