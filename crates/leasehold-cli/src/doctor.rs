//! `doctor`: checks a store for settings that make locks unsafe, and prints the fix.

use std::fmt::Write as _;

use leasehold::{Component, Diagnosis, Finding, Severity};
use serde_json::{Map, Value, json};

use crate::args::{DoctorArgs, print_text};
use crate::exit::{Exit, Stop};
use crate::inspect::{print_json, store_line};
use crate::store::Store;
use crate::text::printable;

pub(crate) async fn doctor(store: &Store, args: DoctorArgs) -> Result<Exit, Stop> {
    let client = store.connect_quietly().await?;
    let report = Report { diagnosis: client.diagnose().await?, accepted: args.accept };
    if args.json {
        let mut value = report.to_json();
        value["store"] = store.public_url().into();
        print_json(&value)?;
    } else {
        print_text(&format!("{}{}", store_line(store), report.text()))?;
    }
    Ok(if report.is_dangerous() { Exit::Danger } else { Exit::Success })
}

/// The diagnosis, and the findings that the operator accepts.
struct Report {
    diagnosis: Diagnosis,
    accepted: Vec<String>,
}

impl Report {
    fn is_accepted(&self, finding: &Finding) -> bool {
        finding.severity != Severity::Fine && self.accepted.iter().any(|id| id == finding.id)
    }

    /// Whether there is a danger that the operator has not accepted.
    fn is_dangerous(&self) -> bool {
        let mut findings = self.diagnosis.components.iter().flat_map(|component| &component.findings);
        findings.any(|finding| finding.severity == Severity::Danger && !self.is_accepted(finding))
    }
}

// --- As text -------------------------------------------------------------------------------------

impl Report {
    /// The findings, the most severe first, each once with all of its components; then the facts of each component.
    fn text(&self) -> String {
        let (mut text, diagnosis) = (String::new(), &self.diagnosis);
        let (accepted, open): (Vec<_>, Vec<_>) =
            grouped(diagnosis).into_iter().partition(|(finding, _)| self.is_accepted(finding));
        for (finding, names) in open {
            finding_text(&mut text, finding, &names);
        }
        for (finding, names) in accepted {
            let (what, names) = (printable(&finding.what), printable(&names.join(", ")));
            let _ = writeln!(text, "accepted {}: {what} ({names})", finding.id);
        }
        for component in &diagnosis.components {
            let _ = writeln!(text, "\n{}", printable(&component.name));
            let width = component.facts.iter().map(|fact| fact.name.len()).max().unwrap_or(0);
            for fact in &component.facts {
                let _ = writeln!(text, "  {:<width$}  {}", fact.name, printable(&fact.value));
            }
        }
        if remedies(diagnosis).any(|remedy| remedy.starts_with("CONFIG SET")) {
            text += "\nCONFIG SET lasts until the server restarts; CONFIG REWRITE writes it into its file.\n";
        }
        text
    }
}

fn finding_text(text: &mut String, finding: &Finding, names: &[&str]) {
    let (word, names) = (finding.severity.to_string(), names.join(", "));
    let _ = write!(text, "{word:<8}{} ({})", printable(&finding.what), printable(&names));
    if finding.severity == Severity::Fine {
        text.push('\n');
    } else {
        let _ = writeln!(text, " [{}]", finding.id);
        for line in wrapped(&printable(&finding.why)) {
            let _ = writeln!(text, "        {line}");
        }
    }
    if let Some(remedy) = &finding.remedy {
        let _ = writeln!(text, "        > {}", printable(remedy));
    }
}

fn remedies(diagnosis: &Diagnosis) -> impl Iterator<Item = &str> {
    let findings = diagnosis.components.iter().flat_map(|component| &component.findings);
    findings.filter_map(|finding| finding.remedy.as_deref())
}

/// Groups equal findings. Servers of one store have similar settings, so most findings apply to several of them.
fn grouped(diagnosis: &Diagnosis) -> Vec<(&Finding, Vec<&str>)> {
    let mut groups: Vec<(&Finding, Vec<&str>)> = Vec::new();
    for component in &diagnosis.components {
        for finding in &component.findings {
            match groups.iter_mut().find(|(known, _)| *known == finding) {
                Some((_, names)) => names.push(&component.name),
                None => groups.push((finding, vec![&component.name])),
            }
        }
    }
    groups.sort_by_key(|(finding, _)| finding.rank());
    groups
}

/// The maximum length of a line of prose, in characters.
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

impl Report {
    fn to_json(&self) -> Value {
        let components = self.diagnosis.components.iter().map(|component| self.component_json(component));
        json!({ "dangerous": self.is_dangerous(), "components": components.collect::<Vec<_>>() })
    }

    fn component_json(&self, component: &Component) -> Value {
        let facts: Map<String, Value> =
            component.facts.iter().map(|fact| (fact.name.to_owned(), json!(fact.value))).collect();
        let findings = component.findings.iter().map(|finding| self.finding_json(finding));
        json!({ "name": component.name, "facts": facts, "findings": findings.collect::<Vec<_>>() })
    }

    fn finding_json(&self, finding: &Finding) -> Value {
        json!({
            "id": finding.id,
            "severity": finding.severity.to_string(),
            "accepted": self.is_accepted(finding),
            "what": finding.what,
            "why": finding.why,
            "remedy": finding.remedy,
        })
    }
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
