//! The documents name tests as their evidence: each of them must exist.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Everything that is written in Rust here.
fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

/// The names in the last column of a table whose head says `shown by`.
fn evidence(document: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut in_table = false;
    for line in document.lines() {
        if !line.starts_with('|') {
            in_table = false;
        } else if line.contains("shown by") {
            in_table = true;
        } else if in_table && let Some(column) = line.trim_end_matches('|').rsplit('|').next() {
            let quoted = column.split('`').skip(1).step_by(2);
            names.extend(
                quoted
                    .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
                    .map(str::to_owned),
            );
        }
    }
    names
}

#[test]
fn every_test_that_a_document_names_exists() {
    let mut code = String::new();
    sources(&root().join("crates"), &mut code);
    for document in ["README.md", "docs/guarantees.md", "docs/operations.md", "docs/redlock.md"] {
        let names = evidence(&fs::read_to_string(root().join(document)).unwrap());
        assert!(names.len() > 5, "{document} shows no evidence");
        for name in names {
            assert!(
                ["(", "<"].iter().any(|next| code.contains(&format!("fn {name}{next}"))),
                "{document} names {name}, which does not exist"
            );
        }
    }
}

#[test]
fn evidence_in_a_table_is_found() {
    let document = "| promise | shown by |\n|---|---|\n| it works | `a_test`; `cargo bench` and `b_test` |\n\n| a | `no` |\n";
    assert_eq!(evidence(document), ["a_test", "b_test"]);
}
