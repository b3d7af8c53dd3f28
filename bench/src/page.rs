//! The report: `docs/benchmarks.md` and its pictures, from what one run found. Pure, but for reading and writing files.

mod columns;
mod pictures;
mod plot;
mod tables;
mod verdict;
mod words;

use std::fs;
use std::io;
use std::path::Path;

use crate::compare::results::Results;

/// The pictures of a page: file names and contents.
pub type Pictures = Vec<(String, String)>;

/// Writes the page, its pictures, and the results that they were made from.
///
/// # Errors
///
/// When there are no results, or the files can't be written.
pub fn publish(from: &Path) -> io::Result<()> {
    let results = Results::read(from)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", from.display())))?;
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs");
    let (page, pictures) = write(&results);
    let folder = docs.join("benchmarks");
    // Pictures of an earlier run that this one does not have.
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

/// The page, and its pictures.
#[must_use]
pub fn write(results: &Results) -> (String, Pictures) {
    let pictures = pictures::draw(results);
    let mut page = words::opening(results);
    page += &tables::participants(results);
    for scenario in words::SCENARIOS {
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
    page += &words::verdict(&verdict::verdict(results));
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
    fn the_page_names_what_it_ran_on_and_how_to_run_it_again() {
        let (page, _) = page();
        for words in
            ["AMD EPYC", "Redis 7.0.15", "cargo run --release -p leasehold-bench -- compare", "2026-11-21"]
        {
            assert!(page.contains(words), "{words}");
        }
    }

    #[test]
    fn a_peer_that_is_missing_is_in_the_tables() {
        let (page, _) = page();
        assert!(page.contains("| redis-py | *missing: it is not built: bench/setup redis-py* |"), "{page}");
    }

    #[test]
    fn a_lock_that_let_two_in_is_called_broken() {
        let (page, _) = page();
        let row = page.lines().rfind(|line| line.starts_with("| redsync, tuned |")).unwrap();
        assert!(row.contains("**broken**"), "{row}");
    }

    #[test]
    fn ratios_to_the_lower_bound_stand_beside_absolute_figures() {
        let (page, _) = page();
        let row = page.lines().find(|line| line.starts_with("| **leasehold** |")).unwrap();
        assert!(row.contains("30.00 µs (28.00 µs to 32.00 µs), 1.50 ×"), "{row}");
    }

    #[test]
    fn where_leasehold_is_behind_is_told() {
        let (page, _) = page();
        assert!(page.contains("Redisson RLock: 8,000"), "{page}");
        assert!(page.contains("two PINGs: 20.00 µs"), "{page}");
    }

    #[test]
    fn every_picture_is_shown() {
        let (page, pictures) = page();
        assert!(!pictures.is_empty());
        for (name, _) in pictures {
            assert!(page.contains(&format!("(benchmarks/{name})")), "{name}");
        }
    }
}
