//! `migrate`: creates the tables of a `postgres:` store, or prints how.

use crate::args::{MigrateArgs, print};
use crate::exit::{Exit, Stop};
use crate::output::message;
use crate::store::Store;

pub(crate) async fn migrate(store: &Store, args: &MigrateArgs) -> Result<Exit, Stop> {
    if args.print {
        print(leasehold::postgres::schema_sql(store.url())?.as_bytes())?;
    } else {
        leasehold::postgres::migrate(store.url()).await?;
        message(format_args!("{}: the tables are there", store.public_url()));
    }
    Ok(Exit::Success)
}
