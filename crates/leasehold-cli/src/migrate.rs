//! `migrate`: creates the tables of a `postgres:` store, or prints how.

use crate::args::print;
use crate::exit::{Exit, Stop};
use crate::output::{Level, message};
use crate::store::Store;

/// psql goes on after an error otherwise, and ends with 0.
const FOR_PSQL: &str =
    "-- leasehold migrate --print | psql postgres://OWNER@HOST/DATABASE\n\\set ON_ERROR_STOP on\n";

pub(crate) async fn migrate(store: &Store) -> Result<Exit, Stop> {
    leasehold::postgres::migrate_with(store.builder()).await?;
    message(Level::Info, "migrated", format_args!("{}: the tables are there", store.public_url()));
    Ok(Exit::Success)
}

/// Prints the statements, for the schema that the address names. Another store says nothing about it.
pub(crate) fn print_statements(store: Option<String>) -> Result<Exit, Stop> {
    let store = store.filter(|url| url.starts_with("postgres:") || url.starts_with("postgresql:"));
    let url = store.unwrap_or_else(|| "postgres://localhost/".to_owned());
    print(format!("{FOR_PSQL}{}", leasehold::postgres::schema_sql(&url)?).as_bytes())?;
    Ok(Exit::Success)
}
