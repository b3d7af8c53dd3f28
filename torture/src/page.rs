//! The page `docs/torture.md`, from the reports.
