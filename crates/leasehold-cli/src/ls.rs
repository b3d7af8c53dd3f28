//! `ls`: the locks in use, or some of them.

use std::io;

use glob::Pattern;
use leasehold::{LockInfo, SCHEMES};
use serde_json::{Value, json};

use crate::args::{LsArgs, name, print_text};
use crate::exit::{Exit, Stop};
use crate::inspect::{lock_json, print_json, store_line};
use crate::output::{Level, message};
use crate::store::Store;
use crate::table::{self, Columns};
use crate::text::printable;

pub(crate) async fn ls(store: &Store, args: LsArgs) -> Result<Exit, Stop> {
    let filter = Filter::new(&args)?;
    let client = store.connect().await?;
    let mut locks = client.list().await?;
    let listed = locks.len();
    locks.retain(|lock| filter.passes(lock));
    if args.json {
        let locks: Vec<Value> = locks.iter().map(lock_json).collect();
        return print_json(&json!({ "store": store.public_url(), "locks": locks }));
    }
    if locks.is_empty() {
        let url = printable(&store.public_url());
        let others = if listed > 0 { format!(", of {listed} in use") } else { String::new() };
        let what = if filter.is_any() { "no such lock is in use" } else { "no lock is in use" };
        message(Level::Info, "unused", format_args!("{what} on {url}{others}"));
        return Ok(Exit::Success);
    }
    let rows: Vec<_> = locks.iter().map(table::row).collect();
    // Programs get all of it, and people what fits; `show` has the rest.
    let room = terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0));
    let columns = Columns::new(&rows, room);
    let lines = [columns.line(&table::HEAD)].into_iter().chain(rows.iter().map(|row| columns.line(row)));
    print_text(&format!("{}{}\n", store_line(store), lines.collect::<Vec<_>>().join("\n")))
}

/// Which locks `ls` prints.
struct Filter<'a> {
    patterns: Vec<Pattern>,
    args: &'a LsArgs,
}

impl<'a> Filter<'a> {
    fn new(args: &'a LsArgs) -> Result<Self, Stop> {
        let pattern = |typed| {
            let typed = name(typed)?;
            if SCHEMES
                .iter()
                .any(|scheme| typed.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://")))
            {
                // It may have a password, so it is not repeated.
                return Err(Stop::usage("an address of a store is named by --store or LEASEHOLD_STORE"));
            }
            let wrong =
                |error: glob::PatternError| Stop::usage(format!("{typed:?} is no pattern: {}", error.msg));
            Pattern::new(typed).map_err(wrong)
        };
        Ok(Self { patterns: args.names.iter().map(pattern).collect::<Result<_, Stop>>()?, args })
    }

    /// Whether it leaves out any lock.
    fn is_any(&self) -> bool {
        !self.patterns.is_empty() || self.args.kind.is_some() || self.args.waiting
    }

    fn passes(&self, lock: &LockInfo) -> bool {
        let is_named =
            self.patterns.is_empty() || self.patterns.iter().any(|pattern| pattern.matches(&lock.name));
        is_named
            && self.args.kind.is_none_or(|kind| kind == lock.kind)
            && (!self.args.waiting || !lock.waiters.is_empty())
    }
}
