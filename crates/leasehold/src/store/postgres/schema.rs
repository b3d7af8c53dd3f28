//! The tables: what a database administrator reviews, and how they come into being.

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error};

use super::error::explain;
use crate::store::StoreError;
use leasehold_core::Failure;

/// Schema version.
const LAYOUT: i64 = 1;

/// Serializes clients that create the tables at the same time.
const CREATION_LOCK: &str = "SELECT pg_advisory_xact_lock(5497853469226813764)";

/// A lock with one holder is one row. Every change of it leaves the indexed columns alone, so that it is a heap-only update, and
/// half of each page is free for the next version: the table does not grow, and its indexes see no change. `visit` is when the
/// sweep looks at the row, which commands do not change either.
const TABLES: &str = "
CREATE TABLE {s}.layout (version int8 NOT NULL);
CREATE TABLE {s}.resource (
    id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE \"C\" NOT NULL, kind text COLLATE \"C\" NOT NULL,
    capacity int8 NOT NULL DEFAULT 0, in_use int8 NOT NULL DEFAULT 0, last_token int8 NOT NULL DEFAULT 0,
    next_place int8 NOT NULL DEFAULT 1, head int8 NOT NULL DEFAULT 0, leases int8 NOT NULL DEFAULT 0,
    waiters int8 NOT NULL DEFAULT 0, parked int8 NOT NULL DEFAULT 0, tombstones int8 NOT NULL DEFAULT 0,
    next_expiry int8 NOT NULL DEFAULT 9223372036854775807, remember_until int8 NOT NULL DEFAULT 0, visit int8 NOT NULL,
    client bytea, sequence int8, owner bytea, weight int8, token int8, granted_at int8, expires_at int8, claimed bool,
    kept bool, metadata bytea,
    UNIQUE (name, kind), CHECK (last_token < 9007199254740992)
) WITH (fillfactor = 50, {vacuum});
CREATE INDEX resource_visit ON {s}.resource (visit);
CREATE TABLE {s}.lease (
    resource int8 NOT NULL, client bytea NOT NULL, sequence int8 NOT NULL, owner bytea, weight int8 NOT NULL,
    token int8 NOT NULL, granted_at int8 NOT NULL, expires_at int8 NOT NULL, claimed bool NOT NULL, kept bool NOT NULL,
    metadata bytea NOT NULL, PRIMARY KEY (resource, client, sequence)
) WITH (fillfactor = 70, {vacuum});
CREATE INDEX lease_expiry ON {s}.lease (resource, expires_at, client, sequence);
CREATE INDEX lease_owner ON {s}.lease (resource, owner, weight, client, sequence) WHERE owner IS NOT NULL;
CREATE TABLE {s}.waiter (
    resource int8 NOT NULL, place int8 NOT NULL, client bytea NOT NULL, sequence int8 NOT NULL, owner bytea,
    weight int8 NOT NULL, ttl int8 NOT NULL, reserve int8 NOT NULL, since int8 NOT NULL, deadline int8 NOT NULL,
    parked bool NOT NULL, metadata bytea NOT NULL, replaces int8, polls bool NOT NULL, PRIMARY KEY (resource, place)
) WITH (fillfactor = 70, {vacuum});
CREATE UNIQUE INDEX waiter_attempt ON {s}.waiter (resource, client, sequence);
CREATE INDEX waiter_ready ON {s}.waiter (resource, place) WHERE NOT parked;
CREATE INDEX waiter_deadline ON {s}.waiter (resource, deadline, place);
CREATE TABLE {s}.tombstone (
    resource int8 NOT NULL, client bytea NOT NULL, sequence int8 NOT NULL, until int8 NOT NULL,
    PRIMARY KEY (resource, client, sequence)
) WITH ({vacuum});
CREATE TABLE {s}.mail (
    client bytea NOT NULL, id int8 GENERATED ALWAYS AS IDENTITY, message text NOT NULL, at int8 NOT NULL,
    PRIMARY KEY (client, id)
) WITH ({vacuum});
{fence}CREATE VIEW {s}.holders AS
    SELECT kind, name, convert_from(owner, 'UTF8') AS owner, token, to_timestamp(granted_at / 1e6) AS granted_at,
        to_timestamp(expires_at / 1e6) AS expires_at, convert_from(metadata, 'UTF8') AS metadata
    FROM {s}.resource WHERE client IS NOT NULL
    UNION ALL
    SELECT r.kind, r.name, convert_from(l.owner, 'UTF8'), l.token, to_timestamp(l.granted_at / 1e6),
        to_timestamp(l.expires_at / 1e6), convert_from(l.metadata, 'UTF8')
    FROM {s}.lease AS l JOIN {s}.resource AS r ON r.id = l.resource;
CREATE VIEW {s}.waiters AS
    SELECT r.kind, r.name, w.place, to_timestamp(w.since / 1e6) AS since, to_timestamp(w.deadline / 1e6) AS deadline,
        w.parked, convert_from(w.metadata, 'UTF8') AS metadata
    FROM {s}.waiter AS w JOIN {s}.resource AS r ON r.id = w.resource;
INSERT INTO {s}.layout VALUES ({layout});
";

/// The check raises an error for a stale token, which the transaction cannot commit after. It waits at an advisory lock of the
/// transaction, because that names the session which holds it; the row would name a subtransaction that has ended.
const FENCE: &str = "
CREATE TABLE IF NOT EXISTS {s}.fence (
    resource text COLLATE \"C\", token int8 NOT NULL, CONSTRAINT fence_pkey PRIMARY KEY (resource)
) WITH (fillfactor = 50, {vacuum});
CREATE OR REPLACE FUNCTION {s}.check_fence(text, int8) RETURNS void LANGUAGE plpgsql SET lock_timeout = '10s'
    SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lock_key int8 := hashtextextended('leasehold fence:' || $1, 0);
    found_token int8;
    blocker text;
BEGIN
    PERFORM pg_advisory_xact_lock(lock_key);
    INSERT INTO {s}.fence AS f VALUES ($1, $2) ON CONFLICT ON CONSTRAINT fence_pkey
        DO UPDATE SET token = $2 WHERE f.token <= $2;
    IF NOT FOUND THEN
        SELECT f.token INTO found_token FROM {s}.fence AS f WHERE f.resource = $1;
        RAISE EXCEPTION '% was written with token %; % is older, so its lease has ended', $1, found_token, $2
            USING ERRCODE = 'LH001';
    END IF;
EXCEPTION WHEN lock_not_available THEN
    SELECT string_agg(format('process %s of %s, since %s', a.pid, a.usename, a.xact_start), ', ') INTO blocker
        FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
            AND l.classid::int8 = (lock_key >> 32) & 4294967295 AND l.objid::int8 = lock_key & 4294967295;
    RAISE EXCEPTION 'another transaction keeps it: %', coalesce(blocker, 'it has just ended')
        USING ERRCODE = 'lock_not_available';
END $$;
";

/// The transaction that creates the fence. A role that may not create a schema can use one that exists.
pub(crate) fn fence_ddl(schema: &str, exists: bool) -> String {
    let create = FENCE.replace("{vacuum}", VACUUM).replace("{s}", schema);
    let schema = if exists { String::new() } else { format!("CREATE SCHEMA IF NOT EXISTS {schema};") };
    format!("BEGIN; {CREATION_LOCK}; {schema} {create} COMMIT")
}

/// The rows are few and change often: they are vacuumed by their number, not by a share of the table, and without pauses.
const VACUUM: &str = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, \
    autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 10000";

/// The statements that create the tables, with what an application's role needs.
pub(crate) fn ddl(schema: &str) -> String {
    format!(
        "CREATE SCHEMA IF NOT EXISTS {schema};{}\n-- for each role that uses the locks:\n\
         -- GRANT USAGE ON SCHEMA {schema} TO app;\n\
         -- GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO app;\n",
        tables(schema, FENCE)
    )
}

fn tables(schema: &str, fence: &str) -> String {
    let layout = LAYOUT.to_string();
    TABLES
        .replace("{fence}", fence)
        .replace("{vacuum}", VACUUM)
        .replace("{s}", schema)
        .replace("{layout}", &layout)
}

fn refused(message: String) -> StoreError {
    StoreError::new(Failure::NotSent, message)
}

/// Checks the tables, and creates them if they are missing.
pub(super) async fn prepare(client: &Client, schema: &str) -> Result<(), StoreError> {
    if check(client, schema).await? {
        return Ok(());
    }
    let created = match create(client, schema).await? {
        // The fence was created meanwhile, and its schema with it.
        Err(error) if error.code() == Some(&SqlState::DUPLICATE_SCHEMA) => create(client, schema).await?,
        created => created,
    };
    let Err(error) = created else { return Ok(()) };
    // Another client may have been faster.
    if check(client, schema).await? {
        return Ok(());
    }
    if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) {
        let ddl = ddl(schema);
        let what = format!(
            "the schema {schema:?} has no tables of leasehold, and this role may not create them; let its owner run \
             `leasehold migrate`, or these statements:\n{ddl}"
        );
        return Err(refused(what).caused_by(error));
    }
    Err(explain(error, false))
}

/// Creates the tables. The inner error is that of the transaction, which has ended.
async fn create(client: &Client, schema: &str) -> Result<Result<(), Error>, StoreError> {
    let exists = format!(
        "SELECT to_regnamespace('{schema}') IS NOT NULL, to_regprocedure('{schema}.check_fence(text, int8)') IS NOT NULL"
    );
    let rows = client.query_typed(&exists, &[]).await.map_err(|error| explain(error, false))?;
    let exists = |at| rows[0].try_get::<_, bool>(at).map_err(|error| explain(error, false));
    let create = if exists(0)? { String::new() } else { format!("CREATE SCHEMA {schema};") };
    // The program may have created the fence. What an administrator has changed in its function stays.
    let fence = if exists(1)? { "" } else { FENCE };
    let statements = format!("BEGIN; {CREATION_LOCK}; {create}{} COMMIT", tables(schema, fence));
    let created = client.batch_execute(&statements).await;
    if created.is_err() {
        // Whether or not the transaction began.
        let _ = client.batch_execute("ROLLBACK").await;
    }
    Ok(created)
}

/// Whether the tables are there, in the layout of this version.
async fn check(client: &Client, schema: &str) -> Result<bool, StoreError> {
    let rows = client.query_typed(&format!("SELECT max(version) FROM {schema}.layout"), &[]).await;
    match rows.and_then(|rows| rows[0].try_get::<_, Option<i64>>(0)) {
        Ok(Some(LAYOUT)) => Ok(true),
        Ok(Some(other)) => Err(refused(format!(
            "another version of leasehold made the schema {schema:?} (layout {other}, this one knows {LAYOUT}): use that, or \
             another schema"
        ))),
        Ok(None) => Err(refused(format!("the schema {schema:?} is of another program: name another with ?schema="))),
        Err(error) => match error.code() {
            Some(&(SqlState::UNDEFINED_TABLE | SqlState::INVALID_SCHEMA_NAME)) => Ok(false),
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Err(refused(format!(
                "this role may not use the schema {schema:?}; let its owner run: GRANT USAGE ON SCHEMA {schema} TO role; GRANT \
                 SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO role"
            ))
            .caused_by(error)),
            _ => Err(explain(error, false)),
        },
    }
}
