//! The report: `docs/benchmarks.md` and its charts, from the results of one run. Only `publish` reads and writes files.

mod columns;
mod pictures;
mod plot;
pub mod scale;
mod tables;
mod text;
mod verdict;

use std::fs;
use std::io;
use std::path::Path;

use crate::compare::results::Results;
pub use pictures::Pictures;

/// Writes the page, its charts, and a copy of the results.
///
/// # Errors
///
/// The results cannot be read, or a file cannot be written.
pub fn publish(from: &Path) -> io::Result<()> {
    let results = Results::read(from)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", from.display())))?;
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs");
    let (page, pictures) = write(&results);
    let folder = docs.join("benchmarks");
    // An earlier run may have charts that this one lacks.
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => fs::create_dir_all(&folder)?,
    }
    for (name, picture) in pictures {
        fs::write(folder.join(name), picture)?;
    }
    fs::write(docs.join("benchmarks.md"), page)?;
    results.write(&docs.join("benchmarks.json"))
}

/// Renders the page and its charts.
#[must_use]
pub fn write(results: &Results) -> (String, Pictures) {
    let pictures = pictures::draw(results);
    let mut page = text::opening(results);
    page += &tables::participants(results);
    for scenario in text::SCENARIOS {
        if results.cells.iter().any(|cell| cell.scenario == scenario.letter) {
            page += &format!("\n## ({}) {}\n\n{}\n", scenario.letter, scenario.title, scenario.about);
            for (name, _) in
                pictures.iter().filter(|(name, _)| name.starts_with(&format!("{}-", scenario.letter)))
            {
                page += &format!("\n![{}](benchmarks/{name})\n", scenario.title);
            }
            page += &tables::scenario(results, scenario.letter);
        }
    }
    page += &text::verdict(&verdict::verdict(results));
    (page, pictures)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = include_str!("../tests/sample.json");

    fn page() -> (String, Pictures) {
        write(&serde_json::from_str(SAMPLE).unwrap())
    }

    #[test]
    fn the_page_names_machine_server_date_and_command() {
        let (page, _) = page();
        for words in
            ["AMD EPYC", "Redis 7.0.15", "cargo run --release -p leasehold-bench -- compare", "2026-11-21"]
        {
            assert!(page.contains(words), "{words}");
        }
    }

    #[test]
    fn a_missing_peer_appears_in_the_tables() {
        let (page, _) = page();
        assert!(page.contains("| redis-py | *missing: it is not built: bench/setup redis-py* |"), "{page}");
    }

    #[test]
    fn a_lock_with_two_holders_is_marked_broken() {
        let (page, _) = page();
        let row = page.lines().rfind(|line| line.starts_with("| redsync, tuned |")).unwrap();
        assert!(row.contains("**broken**"), "{row}");
    }

    #[test]
    fn a_failed_attempt_is_named_below_its_table_without_advice() {
        let mut results: Results = serde_json::from_str(SAMPLE).unwrap();
        results.cells[0].rows[1].failure = Some("no | answer. Restart the server.".to_owned());
        let (page, _) = write(&results);
        let row = &results.cells[0].rows[1].row;
        assert!(page.contains(&format!("\nAttempts of {row} failed, with: no \\| answer\n")), "{page}");
    }

    #[test]
    fn absolute_figures_have_their_ratio_to_the_lower_bound() {
        let (page, _) = page();
        let row = page.lines().find(|line| line.starts_with("| **leasehold** |")).unwrap();
        assert!(row.contains("30.00 µs (28.00 µs to 32.00 µs), 1.50 ×"), "{row}");
    }

    #[test]
    fn rows_where_leasehold_is_behind_are_listed() {
        let (page, _) = page();
        assert!(page.contains("Redisson RLock: 8,000"), "{page}");
        assert!(page.contains("two PINGs: 20.00 µs"), "{page}");
    }

    #[test]
    fn every_chart_is_linked() {
        let (page, pictures) = page();
        assert!(!pictures.is_empty());
        for (name, _) in pictures {
            assert!(page.contains(&format!("(benchmarks/{name})")), "{name}");
        }
    }
}
