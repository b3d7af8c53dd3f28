//! The documents name tests as their evidence, and each of them must exist. Every public item has an example. The documents
//! of `leasehold::guide` link to each other in a form that works on GitHub and in rustdoc.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Appends the text of every Rust file in a folder.
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
    for folder in ["crates", "sim", "torture"] {
        sources(&root().join(folder), &mut code);
    }
    for document in [
        "README.md",
        "docs/guarantees.md",
        "docs/http-api.md",
        "docs/operations.md",
        "docs/postgres.md",
        "docs/redlock.md",
    ] {
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

/// The rows of the tables below a document's headings of a level, each with its cells. A `|` inside of code is not expected.
fn rows<'d>(document: &'d str, head: &str) -> Vec<Vec<&'d str>> {
    let (mut rows, mut is_below) = (Vec::new(), false);
    for line in document.lines() {
        if !line.starts_with('|') {
            is_below = false;
        } else if line.starts_with(head) {
            is_below = true;
        } else if is_below && !line.starts_with("|---") {
            rows.push(line.trim_matches('|').split(" | ").map(str::trim).collect());
        }
    }
    rows
}

/// What is wrong with a record of bugs: a test that does not exist, a commit that is no short id, a command without the commit that
/// mended the bug, a heading that is not among the promises, or a count by finder that is not the number of rows.
fn faults_of_the_record(record: &str, promises: &str, code: &str) -> Vec<String> {
    let is_commit = |text: &str| text.len() == 7 && text.chars().all(|c| c.is_ascii_hexdigit());
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let bugs = rows(record, "| what broke | found by |");
    let mut faults = Vec::new();
    for bug in &bugs {
        let [what, _, tests, commit, command] = bug[..] else {
            faults.push(format!("{bug:?} has another number of cells"));
            continue;
        };
        let is_defined =
            |test: &String| ["(", "<"].iter().any(|next| code.contains(&format!("fn {test}{next}")));
        let missing: Vec<String> = quoted(tests).into_iter().filter(|test| !is_defined(test)).collect();
        let command = quoted(command).concat();
        let mend = command.strip_prefix("scripts/reproduce ").and_then(|rest| rest.split(' ').next());
        let has_commits = is_commit(&quoted(commit).concat()) && mend.is_some_and(is_commit);
        if quoted(tests).is_empty() || !missing.is_empty() || !has_commits {
            faults.push(format!("{what}: missing tests {missing:?}, or no commit: {commit}, {command}"));
        }
    }
    let headings = record.lines().filter_map(|line| line.strip_prefix("### "));
    let is_new = |heading: &&str| !promises.contains(*heading);
    faults.extend(headings.filter(is_new).map(|heading| format!("{heading:?} is no promise of a document")));
    for finder in rows(record, "| found by | what that is |") {
        let count = bugs.iter().filter(|bug| finder[0] == "all" || bug.get(1) == Some(&finder[0])).count();
        if finder.last() != Some(&count.to_string().as_str()) {
            faults.push(format!("{finder:?}, but there are {count}"));
        }
    }
    faults
}

#[test]
fn record_of_bugs_names_tests_commits_and_promises_that_exist() {
    let mut code = String::new();
    for folder in ["crates", "sim", "torture"] {
        sources(&root().join(folder), &mut code);
    }
    let record = fs::read_to_string(root().join("docs/robustness.md")).unwrap();
    let read = |name: &str| fs::read_to_string(root().join(format!("docs/{name}.md"))).unwrap();
    let promises = ["guarantees", "operations", "http-api", "postgres"].map(read).concat().replace('\n', " ");
    assert!(rows(&record, "| what broke | found by |").len() > 100);
    assert_eq!(faults_of_the_record(&record, &promises, &code), Vec::<String>::new());
}

#[test]
fn false_record_of_bugs_is_found() {
    let found_by =
        "| found by | what that is | evidence | bugs |\n|---|---|---|---|\n| review | a | b | 2 |\n\n";
    let bugs = "### It works\n\n| what broke | found by | test today | last commit with it | shown there by |\n|---|---|---|---|---|\n";
    let good = "| x | review | `a_test` | `0123abc`, run | `scripts/reproduce 9876fed -p core` |\n";
    let faults = |rows: &str| {
        faults_of_the_record(&format!("{found_by}{bugs}{rows}"), "It works. It is fast.", "fn a_test() {}")
            .len()
    };
    assert_eq!(faults(&good.repeat(2)), 0);
    assert_eq!(faults(good), 1, "the count by finder is wrong");
    assert_eq!(faults(&good.repeat(2).replacen("a_test", "no_test", 1)), 1);
    assert_eq!(faults(&good.repeat(2).replacen("0123abc", "HEAD", 1)), 1);
    assert_eq!(faults(&good.repeat(2).replacen("9876fed ", "", 1)), 1);
    let unknown = format!("{found_by}{bugs}{}", good.repeat(2)).replace("### It works", "### It is cheap");
    assert_eq!(faults_of_the_record(&unknown, "It works. It is fast.", "fn a_test() {}").len(), 1);
}

/// A public item, and the documentation before it.
struct Item {
    declaration: String,
    documentation: String,
}

impl Item {
    /// The public types, functions, methods and constants in the text of a source file. Every `pub` item is reachable, because
    /// `unreachable_pub` is a warning. Fields, re-exports and hidden items do not count.
    fn all(source: &str) -> Vec<Self> {
        let (mut items, mut documentation, mut is_hidden) = (Vec::new(), String::new(), false);
        for line in source.lines().map(str::trim) {
            if let Some(text) = line.strip_prefix("///").or_else(|| line.strip_prefix("#[doc = ")) {
                documentation += text.trim_start();
                documentation.push('\n');
            } else if line == "#[doc(hidden)]" {
                is_hidden = true;
            } else if !line.starts_with("#[") && !line.ends_with(")]") {
                if ["struct ", "enum ", "const ", "fn ", "async fn ", "trait ", "static "]
                    .iter()
                    .any(|keyword| line.strip_prefix("pub ").is_some_and(|rest| rest.starts_with(keyword)))
                    && !is_hidden
                {
                    let documentation = documentation.clone();
                    items.push(Self { declaration: line.to_owned(), documentation });
                }
                documentation.clear();
                is_hidden = false;
            }
        }
        items
    }

    /// Whether it refers to an item that it repeats, as `blocking` does.
    fn refers(&self) -> bool {
        self.documentation.trim_start_matches("concat!(\"").starts_with("As [")
    }

    fn lacks_example(&self) -> bool {
        !self.refers() && !self.documentation.contains("```")
    }

    fn lacks_cancel_safety(&self) -> bool {
        self.declaration.contains("async fn") && !self.documentation.contains("# Cancel safety")
    }
}

/// Folders and files of a crate, below `src`, that have no public items for users.
const PRIVATE: [&str; 6] = ["fuzzing.rs", "engine", "engine.rs", "handle.rs", "simulation", "simulation.rs"];

/// The items of the files below `src/FOLDER`. Unit tests have none.
fn public_items(src: &Path, folder: &Path, items: &mut Vec<Item>) {
    for entry in fs::read_dir(src.join(folder)).unwrap() {
        let (path, name) = (entry.as_ref().unwrap().path(), entry.unwrap().file_name());
        let below = folder.join(&name);
        let is_private = PRIVATE.iter().any(|private| below == Path::new(private));
        if is_private || name == "tests" || name == "tests.rs" {
            continue;
        } else if path.is_dir() {
            public_items(src, &below, items);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            items.extend(Item::all(&fs::read_to_string(path).unwrap()));
        }
    }
}

#[test]
fn every_public_item_has_an_example_and_every_async_one_states_its_cancel_safety() {
    let mut items = Vec::new();
    public_items(&root().join("crates/leasehold/src"), Path::new(""), &mut items);
    assert!(items.len() > 150, "only {} public items were found", items.len());
    // A file of the same name as a private folder, in a public one.
    assert!(items.iter().any(|item| item.declaration.starts_with("pub fn redis_connection")));
    let of_library = items.len();
    public_items(&root().join("crates/leasehold-serve/src"), Path::new(""), &mut items);
    assert!(items.len() > of_library + 15, "leasehold-serve has {} public items", items.len() - of_library);
    let without: Vec<&str> =
        items.iter().filter(|item| item.lacks_example()).map(|item| item.declaration.as_str()).collect();
    assert!(without.is_empty(), "{} public items have no example: {without:#?}", without.len());
    let unsafe_to_drop: Vec<&str> = items
        .iter()
        .filter(|item| item.lacks_cancel_safety())
        .map(|item| item.declaration.as_str())
        .collect();
    assert!(unsafe_to_drop.is_empty(), "these do not state their cancel safety: {unsafe_to_drop:#?}");
}

/// What needs a future, what has another name there (`lost_within`), and what belongs to a lease id.
const ASYNC_ONLY: [&str; 3] = ["run", "lost", "kind"];

#[test]
fn every_call_has_a_blocking_counterpart() {
    let src = root().join("crates/leasehold/src");
    let read = |path: &str| fs::read_to_string(src.join(path)).unwrap();
    let blocking = ["blocking.rs", "blocking/locks.rs", "blocking/guards.rs"].map(read).concat();
    let mut items: Vec<Item> = ["client.rs", "guard.rs", "detached.rs", "options.rs"]
        .map(read)
        .iter()
        .flat_map(|source| Item::all(source))
        .collect();
    public_items(&src, Path::new("locks"), &mut items);
    let calls = items
        .iter()
        .filter_map(|item| item.declaration.split_once("fn "))
        .map(|(_, rest)| rest.split(['(', '<']).next().unwrap());
    let (has, lacks): (Vec<&str>, Vec<&str>) =
        calls.filter(|name| !ASYNC_ONLY.contains(name)).partition(|name| {
            [format!(" {name}("), format!(" {name}<")].iter().any(|call| blocking.contains(call))
        });
    assert!(has.len() > 80, "only {} calls were found", has.len());
    assert!(lacks.is_empty(), "the module `blocking` lacks {lacks:?}");
}

#[test]
fn item_without_an_example_is_found() {
    let source = "
        /// One.\n///\n/// ```\n/// one();\n/// ```\n#[must_use]\npub fn one() {}
        /// Two.\npub async fn two() {}
        /// As [`one`].\npub fn three() {}
        pub(crate) fn four() {}
        #[doc(hidden)]\npub fn five() {}
        #[doc = concat!(\"As [`crate::\", stringify!($kind), \"`].\")]\npub struct $kind(u8);";
    let items = Item::all(source);
    let lacking = |lacks: fn(&Item) -> bool| items.iter().filter(|item| lacks(item)).count();
    assert_eq!((items.len(), lacking(Item::lacks_example), lacking(Item::lacks_cancel_safety)), (4, 1, 1));
    assert!(items[1].lacks_example() && items[1].lacks_cancel_safety());
}

/// In rustdoc a relative path leads nowhere, so the guide's documents link by references, which `guide.rs` redefines.
#[test]
fn documents_of_the_guide_link_by_references() {
    let guide = fs::read_to_string(root().join("crates/leasehold/src/guide.rs")).unwrap();
    for entry in fs::read_dir(root().join("crates/leasehold/guide")).unwrap() {
        let path = entry.unwrap().path();
        let document = fs::read_to_string(&path).unwrap();
        let inline = document.match_indices("](").filter(|(at, _)| !document[at + 2..].starts_with("http"));
        assert_eq!(inline.count(), 0, "{} has a link that is no reference", path.display());
        let references = document.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: "));
        for (name, _) in references {
            assert!(
                guide.contains(&format!("\"[{name}]: ")),
                "{} defines [{name}], guide.rs does not",
                path.display()
            );
        }
    }
}

/// The Markdown documents below a folder, without those of builds and of other projects.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        let is_foreign =
            name == "target" || name == "node_modules" || name.as_encoded_bytes().starts_with(b".");
        if path.is_dir() && !is_foreign {
            documents(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The rows of the document's tables that have another number of cells than the first row of their table.
fn broken_rows(document: &str) -> Vec<&str> {
    let (mut broken, mut cells, mut is_code) = (Vec::new(), None, false);
    for line in document.lines() {
        is_code ^= line.trim_start().starts_with("```");
        if is_code || !line.starts_with('|') {
            cells = None;
            continue;
        }
        let count = line.replace("\\|", "").matches('|').count();
        if *cells.get_or_insert(count) != count || !line.trim_end().ends_with('|') {
            broken.push(line);
        }
    }
    broken
}

#[test]
fn every_row_of_a_table_has_as_many_cells_as_the_first() {
    let mut found = Vec::new();
    documents(&root(), &mut found);
    assert!(found.len() > 15, "only {} documents were found", found.len());
    for path in found {
        let document = fs::read_to_string(&path).unwrap();
        assert_eq!(broken_rows(&document), Vec::<&str>::new(), "{}", path.display());
    }
    assert_eq!(
        broken_rows("| a | b |\n|---|---|\n| 1 | 2 | 3 |\n| `x \\| y` | 2 |\n| 1\n"),
        ["| 1 | 2 | 3 |", "| 1"]
    );
}

/// What a document says where to find: a file, and a function or type in it, written as `file.rs: Type::name`.
fn places(document: &str) -> Vec<(&str, &str)> {
    let quoted = document.split('`').skip(1).step_by(2);
    quoted.filter_map(|text| text.split_once(".rs: ")).collect()
}

/// Whether a source file has a function of that name, or an associated one.
fn has_item(source: &str, name: &str) -> bool {
    let (owner, function) =
        name.rsplit_once("::").map_or((None, name), |(owner, function)| (Some(owner), function));
    let is_defined = ["(", "<"].iter().any(|next| source.contains(&format!("fn {function}{next}")));
    let has_owner = owner.is_none_or(|owner| {
        source.lines().any(|line| {
            let line = line.trim_start();
            let is_impl =
                ["impl", "pub trait", "pub(crate) trait", "trait"].iter().any(|word| line.starts_with(word));
            is_impl && line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == owner)
        })
    });
    is_defined && has_owner
}

#[test]
fn every_function_that_the_architecture_names_is_in_its_file() {
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let places = places(&architecture);
    assert!(places.len() > 50, "only {} places were found", places.len());
    for (file, name) in places {
        let folders = [
            "crates/leasehold/src",
            "crates/leasehold-redis/src",
            "crates",
            "crates/leasehold-core/src",
            "crates/leasehold-redis-protocol/src",
        ];
        let found = folders.iter().map(|folder| root().join(folder).join(format!("{file}.rs")));
        let sources: Vec<String> = found.filter_map(|path| fs::read_to_string(path).ok()).collect();
        assert!(!sources.is_empty(), "there is no file {file}.rs");
        assert!(sources.iter().any(|source| has_item(source, name)), "{file}.rs has no {name}");
    }
    let source = "impl<T> Store for Redis<T> {\n    fn call(&self) {}\n}\n";
    assert!(has_item(source, "Redis::call") && has_item(source, "call"));
    assert!(!has_item(source, "Redis::calls") && !has_item(source, "Sqlite::call"));
}

/// The functions of a script that implement the rules, without those of the clock and of the storage.
fn rules_of(script: &str) -> Vec<&str> {
    let names = script.lines().filter_map(|line| line.strip_prefix("local function "));
    let own = ["draw", "try_draw", "raise_clock", "shown", "store", "publish_all", "client_field_of"];
    names.filter_map(|name| name.split('(').next()).filter(|name| !own.contains(name)).collect()
}

#[test]
fn rules_of_scripts_have_names_of_the_model() {
    let (mut model, scripts) = (String::new(), root().join("crates/leasehold-redis-protocol/src/scripts"));
    sources(&root().join("crates/leasehold-core/src/model"), &mut model);
    model += &fs::read_to_string(root().join("crates/leasehold-core/src/model.rs")).unwrap();
    let mut seen = 0;
    for file in ["model.lua", "acquire.lua", "release.lua"] {
        let script = fs::read_to_string(scripts.join(file)).unwrap();
        for name in rules_of(&script) {
            assert!(model.contains(&format!("fn {name}(")), "{file}: `{name}` is no function of the model");
            seen += 1;
        }
    }
    assert!(seen > 30, "only {seen} functions were found");
}
