//! What all subcommands share: a result, a recipe by its name, and servers.

use std::error::Error;

use leasehold_testkit::Server;

use crate::recipes::{self, Row};

/// A result whose error is printed at the command line.
pub type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The recipe of that name.
///
/// # Errors
///
/// An unknown name; the message lists all names.
pub fn find(id: &str) -> Outcome<&'static Row> {
    recipes::find(id).ok_or_else(|| {
        let names: Vec<_> = recipes::ROWS.iter().map(|row| row.id).collect();
        format!("no recipe is called '{id}'; the recipes are {}", names.join(", ")).into()
    })
}

/// Starts this many servers, and returns them with their addresses. They exit when they are dropped.
#[must_use]
pub fn servers(nodes: usize) -> (Vec<Server>, Vec<String>) {
    let servers: Vec<_> = (0..nodes).map(|_| Server::on_socket()).collect();
    let urls = servers.iter().map(Server::url).collect();
    (servers, urls)
}
