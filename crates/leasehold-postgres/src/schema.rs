//! How the tables come into being: checked when a client connects, created where its role may.

use leasehold_core::Failure;
use leasehold_store::StoreError;
use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use super::conn::Conn;
use super::ddl::{LAYOUT, Present, create, foreign_owners};
use super::error::explain;
use super::pinned::Pinned;
use super::{pooler, rights};
use crate::url::PostgresUrl;

/// How often another client may create the tables, or the program the fence, while this one does.
const RACES: u32 = 3;

fn refused(message: String) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}

/// Where the tables are, and who may own them.
#[derive(Clone, Copy)]
pub(super) struct Home<'u> {
    schema: &'u str,
    owner: Option<&'u str>,
}

impl<'u> Home<'u> {
    pub(super) fn of(url: &'u PostgresUrl) -> Self {
        Self { schema: &url.schema, owner: url.owner.as_deref() }
    }
}

/// Checks the tables, and creates them if they are missing.
pub(super) async fn prepare(conn: &Conn, home: Home<'_>) -> Result<(), StoreError> {
    let (schema, mut races) = (home.schema, 0);
    loop {
        if check(conn, home).await? {
            return Ok(());
        }
        // The program may have created the fence. What an administrator has changed in its function stays.
        let found = present(conn, schema).await?;
        let Err(error) = make(conn, schema, found).await else { return check_owners(conn, home).await };
        match error.code() {
            Some(code) if is_race(code) && races < RACES => races += 1,
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => return Err(may_not_create(schema).caused_by(error)),
            _ => return Err(explain(error, false)),
        }
    }
}

/// Creates what is missing, and makes the views and functions anew.
pub(super) async fn migrate(conn: &Conn, home: Home<'_>) -> Result<(), StoreError> {
    let schema = home.schema;
    let are_there = check(conn, home).await?;
    let limit = fence_limit(conn, schema).await?;
    let found = Present { fence: false, transaction_lock: false, ..present(conn, schema).await? };
    let Err(error) = make(conn, schema, found).await else {
        check_owners(conn, home).await?;
        return match limit {
            None => Ok(()),
            Some(limit) => {
                let keep = format!(
                    "ALTER FUNCTION {schema}.check_fence(pg_catalog.text, pg_catalog.int8) SET lock_timeout = '{}'",
                    limit.replace('\'', "''")
                );
                conn.run(&Pinned::transaction(&format!("{keep};")))
                    .await
                    .map_err(|error| explain(error, false))
            }
        };
    };
    match error.code() {
        Some(code) if is_race(code) => prepare(conn, home).await,
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) if are_there => {
            let what = format!(
                "the tables are there, but only the owner of the schema {schema:?} may renew its views and functions: {}",
                run_migrate(schema)
            );
            Err(refused(what).caused_by(error))
        }
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Err(may_not_create(schema).caused_by(error)),
        _ => Err(explain(error, false)),
    }
}

fn may_not_create(schema: &str) -> StoreError {
    refused(format!(
        "the schema {schema:?} has no tables of leasehold, and this role may not create them: {}",
        run_migrate(schema)
    ))
}

fn run_migrate(schema: &str) -> String {
    let parameter = if schema == "leasehold" { String::new() } else { format!("?schema={schema}") };
    format!(
        "let the owner run `leasehold migrate --store postgres://OWNER@HOST/DATABASE{parameter}`, or what `leasehold migrate \
         --print` prints"
    )
}

/// Whether another session has created the same meanwhile.
fn is_race(code: &SqlState) -> bool {
    [
        SqlState::UNIQUE_VIOLATION,
        SqlState::DUPLICATE_SCHEMA,
        SqlState::DUPLICATE_TABLE,
        SqlState::DUPLICATE_OBJECT,
        SqlState::T_R_DEADLOCK_DETECTED,
        // Two sessions have replaced a function.
        SqlState::INTERNAL_ERROR,
    ]
    .contains(code)
}

/// Runs the statements. The error is that of the transaction, which has ended.
async fn make(conn: &Conn, schema: &str, present: Present) -> Result<(), Error> {
    let created = conn.run(&create(schema, present)).await;
    if created.is_err() {
        // Whether or not the transaction began.
        let _ = conn.roll_back().await;
    }
    created
}

async fn present(conn: &Conn, schema: &str) -> Result<Present, StoreError> {
    let row = conn.row(&Present::query(schema)).await.map_err(|error| explain(error, false))?;
    let is_there = |at: usize| row.get(at).is_some_and(|text| text.as_deref() == Some("t"));
    Ok(Present { schema: is_there(0), fence: is_there(1), transaction_lock: is_there(2) })
}

/// The time limit of the fence's function, which an administrator may have changed.
async fn fence_limit(conn: &Conn, schema: &str) -> Result<Option<String>, StoreError> {
    let query = format!(
        "SELECT setting FROM pg_catalog.pg_proc AS p, unnest(p.proconfig) AS setting
        WHERE p.oid = to_regprocedure('{schema}.check_fence(pg_catalog.text, pg_catalog.int8)')::oid AND setting ~~ 'lock_timeout=%'"
    );
    let mut row = conn.row(&Pinned::new(&query)).await.map_err(|error| explain(error, false))?;
    Ok(row.pop().flatten().and_then(|setting| Some(setting.split_once('=')?.1.to_owned())))
}

/// Refuses a schema whose owner, or that of a table or function in it, is a stranger: triggers and functions of his would run with the
/// rights of this role, and he could hand a lock to two holders.
async fn check_owners(conn: &Conn, home: Home<'_>) -> Result<(), StoreError> {
    let found = conn.line(&foreign_owners(home.schema, home.owner)).await;
    match found.map_err(|error| explain(error, false))?.as_str() {
        "" => Ok(()),
        found => Err(refused(strangers(home.schema, found))),
    }
}

/// Says what to do about [`foreign_owners`].
#[must_use]
pub fn strangers(schema: &str, found: &str) -> String {
    // Names that others have chosen make no lines of their own.
    let found = found.replace(char::is_control, "?");
    format!(
        "another role could run its code as this one: {found}. If this one can trust an owner, name it in the address (?owner=ROLE). Otherwise use another \
         schema (?schema=), or let a superuser make the owner the owner of the database or a superuser (ALTER SCHEMA {schema} OWNER TO …, the \
         same for what is in it); triggers and rules are to be dropped"
    )
}

/// Whether the tables are there, in the layout of this version.
async fn check(conn: &Conn, home: Home<'_>) -> Result<bool, StoreError> {
    // What a stranger has made may run his code when it is read, so the owners come first.
    check_owners(conn, home).await?;
    if let Err(error) = conn.begin().await {
        pooler::try_transaction(conn).await?;
        return Err(explain(error, false));
    }
    let found = read_layout(conn, home).await;
    conn.roll_back().await.map_err(|error| explain(error, false))?;
    let schema = home.schema;
    let found = match found {
        Ok(layout) => layout?,
        Err(error) => match error.code() {
            Some(&(SqlState::UNDEFINED_TABLE | SqlState::INVALID_SCHEMA_NAME)) => return Ok(false),
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                let refusal = refused(format!("this role may not use the tables in the schema {schema:?}"));
                let remedy = conn.line(&rights::query(schema)).await.unwrap_or_default();
                return Err(rights::explain(refusal.caused_by(error), &remedy));
            }
            _ => return Err(explain(error, false)),
        },
    };
    match found {
        Some(layout) if layout == LAYOUT.to_string() => Ok(true),
        Some(other) => Err(refused(format!(
            "another version of leasehold made the schema {schema:?} (layout {other}, this one knows {LAYOUT}): use that, or \
             another schema"
        ))),
        None => {
            Err(refused(format!("the schema {schema:?} is of another program: name another with ?schema=")))
        }
    }
}

/// The number of the layout, within a transaction. The lock keeps a stranger from exchanging what was checked for what is read. A policy
/// that hides the row is an error.
async fn read_layout(conn: &Conn, home: Home<'_>) -> Result<Result<Option<String>, StoreError>, Error> {
    let schema = home.schema;
    let lock = format!("SET LOCAL row_security = off; LOCK TABLE {schema}.layout IN ACCESS SHARE MODE");
    conn.run(&Pinned::new(&lock)).await?;
    if let Err(refusal) = check_owners(conn, home).await {
        return Ok(Err(refusal));
    }
    let mut row = conn.row(&Pinned::new(&format!("SELECT max(version) FROM {schema}.layout"))).await?;
    Ok(Ok(row.pop().flatten()))
}
