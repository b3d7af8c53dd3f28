//! What the documents tell a new user to type works as it stands there.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Place;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

fn document(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The blocks of code in this language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let begin = format!("\n```{language}\n");
    let rest = text.split(begin.as_str()).skip(1);
    rest.map(|rest| rest.split_once("```").expect("it ends").0).collect()
}

fn run(command: &mut Command) {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Builds nothing that the text does not name: no dependency of the tests is there.
#[test]
fn first_program_of_the_readme_compiles_in_a_fresh_project() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("readme");
    for name in ["README.md", "README.zh-CN.md"] {
        let text = document(name);
        let (install, program) = (blocks(&text, "sh")[0], blocks(&text, "rust")[0]);
        let folder = tempfile::tempdir().unwrap();
        let cargo = || {
            let mut cargo = Command::new(env!("CARGO"));
            cargo
                .current_dir(folder.path())
                .env("CARGO_NET_OFFLINE", "true")
                .env("CARGO_TARGET_DIR", &target);
            cargo
        };
        run(cargo().args(["init", "--vcs", "none", "--name", "readme"]));
        fs::write(folder.path().join("src/main.rs"), program).unwrap();
        // The versions that this repository has, so that nothing is fetched.
        fs::copy(root().join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();
        let mut added = 0;
        for line in install.lines() {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["cargo", "add", ..] => {
                    // The clone is beside the project.
                    let clone = root().display().to_string();
                    run(cargo().args(words[1..].iter().map(|word| word.replace("../leasehold", &clone))));
                    added += 1;
                }
                ["cargo", "install", .., "--path", path] => {
                    let manifest = fs::read_to_string(root().join(path).join("Cargo.toml")).unwrap();
                    assert!(manifest.contains("[[bin]]\nname = \"leasehold\""), "{name}: {line}");
                }
                _ => assert!(words.is_empty(), "{name}: {line}"),
            }
        }
        assert!(added >= 2, "{name}: {install}");
        run(cargo().args(["check", "--quiet"]));
    }
}

#[test]
fn man_pages_and_completions_are_installed_by_the_lines_of_the_document() {
    let place = Place::new();
    let home = place.path("home of a new user");
    fs::create_dir(&home).unwrap();
    let text = document("docs/installing.md");
    let (_, section) = text.split_once("## Man pages and completions\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let lines = blocks(section, "sh");
    assert!(lines.len() >= 4, "{lines:?}");
    let program = Path::new(env!("CARGO_BIN_EXE_leasehold")).parent().unwrap();
    let path = format!("{}:/usr/bin:/bin", program.display());
    for block in lines {
        run(Command::new("sh").args(["-euc", block]).env_clear().env("HOME", &home).env("PATH", &path));
    }
    let has_text = |file: &str, text: &str| {
        let found = fs::read_to_string(home.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(found.contains(text), "{file}");
    };
    has_text(".local/share/bash-completion/completions/leasehold", "complete -F _leasehold");
    has_text(".zfunc/_leasehold", "#compdef leasehold");
    has_text(".config/fish/completions/leasehold.fish", "complete -c leasehold");
    has_text(".local/share/man/man1/leasehold.1", ".TH leasehold 1");
    // Every command that the help lists has its page.
    let help = String::from_utf8(place.output(&["-h"]).stdout).unwrap();
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    // A description may go on in the next line, further to the right.
    let lines =
        commands.lines().map_while(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with(' '));
    let commands: Vec<&str> = lines.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"run") && commands.contains(&"serve"), "{help}");
    for command in commands.iter().filter(|command| !["completions", "help", "man"].contains(command)) {
        has_text(
            &format!(".local/share/man/man1/leasehold-{command}.1"),
            &format!(".TH leasehold-{command} 1"),
        );
    }
}

#[test]
fn readme_links_every_document_that_users_need() {
    for name in ["README.md", "README.zh-CN.md"] {
        let text = document(name);
        for linked in [
            "operations",
            "postgres",
            "metrics",
            "bridges",
            "redlock",
            "protocol",
            "http-api",
            "guarantees",
            "installing",
        ] {
            assert!(text.contains(&format!("(docs/{linked}.md")), "{name} does not link {linked}");
        }
    }
}
