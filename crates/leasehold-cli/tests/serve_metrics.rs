//! The first page of metrics of a server: all that the documents list, with nothing counted.
#![cfg(feature = "serve")]

mod common;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use common::Place;
use leasehold::Kind;
use serde_json::Value;

const LIBRARY: &str = include_str!("../../../docs/metrics.md");
const SERVER: &str = include_str!("../../../docs/operations.md");
const DESCRIPTION: &str = include_str!("../../leasehold-serve/openapi.json");

/// A metric with its labels, as `name{label=value,…}`.
type Series = BTreeSet<String>;

fn kinds() -> Vec<String> {
    Kind::ALL.iter().map(ToString::to_string).collect()
}

/// The words in backticks.
fn words(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The cells of a table's rows that begin with a metric.
fn rows<'a>(page: &'a str, prefixes: &'a [&str]) -> impl Iterator<Item = Vec<&'a str>> {
    let is_metric = |line: &&str| prefixes.iter().any(|prefix| line.starts_with(&format!("| `{prefix}")));
    page.lines().filter(is_metric).map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
}

/// All combinations of the labels' values.
fn series(name: &str, labels: &[(String, Vec<String>)]) -> Series {
    let mut all = vec![Vec::new()];
    for (label, values) in labels {
        let with = |one: &Vec<String>, value: &String| [&one[..], &[format!("{label}={value}")]].concat();
        all = all.iter().flat_map(|one| values.iter().map(move |value| with(one, value))).collect();
    }
    all.into_iter().map(|labels| format!("{name}{{{}}}", labels.join(","))).collect()
}

/// What `docs/metrics.md` lists for one client of this store.
fn of_library(store: &str) -> Series {
    let values = |label: &str, metric: &str| -> Vec<String> {
        let is_meant = |first: &str| {
            first == format!("`{label}`")
                || first.starts_with(&format!("`{label}` of a"))
                    && match metric {
                        "leasehold_acquisitions_total" => first.ends_with("an acquisition"),
                        "leasehold_renewals_total" => first.ends_with("a renewal"),
                        _ => first.ends_with("a loss"),
                    }
        };
        let mut cells = LIBRARY.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
        words(cells.find(|(first, _)| is_meant(first)).unwrap_or_else(|| panic!("{label} of {metric}")).1)
    };
    let mut all = Series::new();
    for row in rows(LIBRARY, &["leasehold_"]) {
        let name = words(row[0]).remove(0);
        let labels = words(row[3]);
        let value_of = |label: &String, kind: &str| match label.as_str() {
            "store" => vec![store.to_owned()],
            // Without a label of its own, the kind is the label.
            "kind" | "label" => vec![kind.to_owned()],
            label => values(label, &name),
        };
        for kind in kinds() {
            let labels: Vec<_> = labels.iter().map(|label| (label.clone(), value_of(label, &kind))).collect();
            all.extend(series(&name, &labels));
        }
    }
    all
}

/// What `docs/operations.md` lists.
fn of_server() -> Series {
    let mut all = Series::new();
    for row in rows(SERVER, &["leasehold_store_", "leasehold_serve_"]) {
        let labels = words(row[1]);
        if labels.contains(&"path".to_owned()) {
            continue;
        }
        let values: Vec<String> = words(row[2]).into_iter().filter(|word| !labels.contains(word)).collect();
        let value_of = |label: &String| if label == "kind" { kinds() } else { values.clone() };
        let labels: Vec<_> = labels.iter().map(|label| (label.clone(), value_of(label))).collect();
        for name in words(row[0]) {
            all.extend(series(&name, &labels));
        }
    }
    let description: Value = serde_json::from_str(DESCRIPTION).unwrap();
    for (path, operations) in description["paths"].as_object().unwrap() {
        let path = path.replace('{', ":").replace('}', "");
        for (method, operation) in
            operations.as_object().unwrap().iter().filter(|(key, _)| *key != "parameters")
        {
            for status in operation["responses"].as_object().unwrap().keys() {
                let method = method.to_uppercase();
                all.insert(format!(
                    "leasehold_serve_requests_total{{method={method},path={path},status={status}}}"
                ));
            }
        }
    }
    all
}

/// The series of a page, and those counters that are not 0.
fn shown(page: &str) -> (Series, Vec<&str>) {
    let (mut all, mut counted) = (Series::new(), Vec::new());
    for line in page.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        if name.ends_with("_total") && value != "0" {
            counted.push(line);
        }
        let parts = ["_bucket", "_sum", "_count"];
        let name = parts.iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
        let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty());
        let mut labels: Vec<String> = labels.map(|label| label.replace('"', "")).collect();
        labels.retain(|label| !label.starts_with("le="));
        labels.sort_by_key(|label| position(label));
        all.insert(format!("{name}{{{}}}", labels.join(",")));
    }
    (all, counted)
}

/// The order of labels in the documents.
fn position(label: &str) -> usize {
    let order =
        ["store", "kind", "label", "outcome", "cause", "command", "method", "path", "status", "reason"];
    let name = label.split('=').next().unwrap();
    order.iter().position(|known| *known == name).unwrap_or_else(|| panic!("{label}"))
}

#[test]
fn first_page_has_every_documented_metric_with_zero_and_no_other() {
    let redis = leasehold_testkit::Server::on_port();
    let place = Place::on(&format!("redis://127.0.0.1:{}", redis.port()));
    let socket = place.path("socket");
    let mut server = place.start(&["serve", "--listen", &format!("unix:{}", socket.display())]);
    assert!(server.line().starts_with("listening on "));
    let mut stream = UnixStream::connect(&socket).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (_, page) = answer.split_once("\r\n\r\n").unwrap();
    let (shown, counted) = shown(page);
    assert!(counted.is_empty(), "{counted:?}");
    let documented: Series = of_library("redis").union(&of_server()).cloned().collect();
    let missing: Vec<_> = documented.difference(&shown).collect();
    assert!(missing.is_empty(), "documented, and not on the page: {missing:#?}");
    let unknown: Vec<_> = shown.difference(&documented).collect();
    assert!(unknown.is_empty(), "on the page, and not documented: {unknown:#?}");
    assert!(documented.len() > 300, "{}", documented.len());
}
