//! The statements that create the tables, as a database administrator reviews them. They can be run again: that leaves the rows
//! as they are, and makes the views and the functions anew.
//!
//! They are one transaction, for which the path is set: a view and a constraint keep what their names meant when they were
//! created.

use super::pinned::Pinned;

/// Schema version.
pub(super) const LAYOUT: i64 = 2;

/// A lock with one holder is one row. Every change of it leaves the indexed columns alone, so that it is a heap-only update, and
/// half of each page is free for the next version: the table does not grow, and its indexes see no change. `visit` is when the
/// sweep looks at the row, which commands do not change either.
///
/// `inbox` is the client that speaks for an attempt; without one it is the client of its id. A waiter's `recipient` is either.
///
/// The condition spares the locks that `CREATE INDEX IF NOT EXISTS` waits for, in tables that are in use.
const TABLES: &str = "
DO $tables$ BEGIN
IF to_regclass('{s}.layout') IS NOT NULL THEN RETURN; END IF;
CREATE TABLE {s}.layout (version int8 NOT NULL);
CREATE TABLE {s}.resource (
    id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE \"C\" NOT NULL, kind text COLLATE \"C\" NOT NULL,
    capacity int8 NOT NULL DEFAULT 0, in_use int8 NOT NULL DEFAULT 0, last_token int8 NOT NULL DEFAULT 0,
    next_place int8 NOT NULL DEFAULT 1, head int8 NOT NULL DEFAULT 0, leases int8 NOT NULL DEFAULT 0,
    waiters int8 NOT NULL DEFAULT 0, parked int8 NOT NULL DEFAULT 0, tombstones int8 NOT NULL DEFAULT 0,
    next_expiry int8 NOT NULL DEFAULT 9223372036854775807, remember_until int8 NOT NULL DEFAULT 0, visit int8 NOT NULL,
    client bytea, sequence int8, inbox bytea, owner bytea, weight int8, token int8, granted_at int8, expires_at int8,
    claimed bool, kept bool, metadata bytea,
    UNIQUE (name, kind), CHECK (last_token < 9007199254740992)
) WITH (fillfactor = 50, {vacuum});
CREATE INDEX resource_visit ON {s}.resource (visit);
CREATE TABLE {s}.lease (
    resource int8 NOT NULL, client bytea NOT NULL, sequence int8 NOT NULL, inbox bytea, owner bytea,
    weight int8 NOT NULL, token int8 NOT NULL, granted_at int8 NOT NULL, expires_at int8 NOT NULL, claimed bool NOT NULL,
    kept bool NOT NULL, metadata bytea NOT NULL, PRIMARY KEY (resource, client, sequence)
) WITH (fillfactor = 70, {vacuum});
CREATE INDEX lease_expiry ON {s}.lease (resource, expires_at, client, sequence);
CREATE INDEX lease_owner ON {s}.lease (resource, owner, weight, client, sequence) WHERE owner IS NOT NULL;
CREATE TABLE {s}.waiter (
    resource int8 NOT NULL, place int8 NOT NULL, client bytea NOT NULL, sequence int8 NOT NULL, inbox bytea,
    recipient bytea NOT NULL GENERATED ALWAYS AS (coalesce(inbox, client)) STORED, owner bytea, weight int8 NOT NULL,
    ttl int8 NOT NULL, reserve int8 NOT NULL, since int8 NOT NULL, deadline int8 NOT NULL, parked bool NOT NULL,
    metadata bytea NOT NULL, replaces int8, polls bool NOT NULL, secret bytea NOT NULL, PRIMARY KEY (resource, place)
) WITH (fillfactor = 70, {vacuum});
CREATE UNIQUE INDEX waiter_attempt ON {s}.waiter (resource, client, sequence);
CREATE INDEX waiter_recipient ON {s}.waiter (resource, recipient, place);
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
INSERT INTO {s}.layout VALUES ({layout});
END $tables$;
";

/// `{text …}` is a column of bytes as a text. A text of PostgreSQL has no zero bytes, and those of a client may.
const VIEWS: &str = "
CREATE OR REPLACE VIEW {s}.holders AS
    SELECT kind, name, {text owner} AS owner, token, to_timestamp(granted_at / 1e6) AS granted_at,
        to_timestamp(expires_at / 1e6) AS expires_at, {text metadata} AS metadata
    FROM {s}.resource WHERE client IS NOT NULL
    UNION ALL
    SELECT r.kind, r.name, {text l.owner}, l.token, to_timestamp(l.granted_at / 1e6),
        to_timestamp(l.expires_at / 1e6), {text l.metadata}
    FROM {s}.lease AS l JOIN {s}.resource AS r ON r.id = l.resource;
CREATE OR REPLACE VIEW {s}.waiters AS
    SELECT r.kind, r.name, w.place, to_timestamp(w.since / 1e6) AS since, to_timestamp(w.deadline / 1e6) AS deadline,
        w.parked, {text w.metadata} AS metadata
    FROM {s}.waiter AS w JOIN {s}.resource AS r ON r.id = w.resource;
";

/// The check raises an error for a stale token, which the transaction cannot commit after. It keeps the row until the transaction
/// ends, for which a role needs a right to the table. The advisory lock excludes nothing: it names the session to those that
/// wait for too long, because the row names a subtransaction that has ended.
const FENCE: &str = "
CREATE TABLE IF NOT EXISTS {s}.fence (
    resource text COLLATE \"C\", token int8 NOT NULL, CONSTRAINT fence_pkey PRIMARY KEY (resource)
) WITH (fillfactor = 50, {vacuum});
CREATE OR REPLACE FUNCTION {s}.check_fence(text, int8) RETURNS void LANGUAGE plpgsql SET lock_timeout = '10s'
    SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    label int8 := hashtextextended('leasehold fence:' || $1, 0);
    found_token int8;
    blocker text;
BEGIN
    INSERT INTO {s}.fence AS f VALUES ($1, $2) ON CONFLICT ON CONSTRAINT fence_pkey
        DO UPDATE SET token = $2 WHERE f.token <= $2;
    IF NOT FOUND THEN
        SELECT f.token INTO found_token FROM {s}.fence AS f WHERE f.resource = $1;
        RAISE EXCEPTION '% was written with token %; % is older, so its lease has ended', $1, found_token, $2
            USING ERRCODE = 'LH001';
    END IF;
    PERFORM pg_try_advisory_xact_lock_shared(label);
EXCEPTION WHEN lock_not_available THEN
    SELECT string_agg(format('process %s of %s, since %s', a.pid, a.usename, a.xact_start), ', ') INTO blocker
        FROM pg_locks AS l JOIN pg_locks AS t ON t.pid = l.pid JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid <> pg_backend_pid()
            AND l.classid::int8 = (label >> 32) & 4294967295 AND l.objid::int8 = label & 4294967295
            AND t.locktype = 'relation' AND t.mode = 'RowExclusiveLock' AND t.relation = '{s}.fence'::regclass
            AND t.database = l.database AND a.datname = current_database();
    RAISE EXCEPTION 'another transaction keeps it: %', coalesce(blocker, 'it has just ended')
        USING ERRCODE = 'lock_not_available';
END $$;
";

/// A transaction keeps the row of a name until it ends. The condition that is never true locks the row and does not write it.
/// A try passes over a row that another transaction keeps. It waits a moment for one that is inserting it.
const TRANSACTION_LOCK: &str = "
CREATE TABLE IF NOT EXISTS {s}.transaction_lock (
    name text COLLATE \"C\", CONSTRAINT transaction_lock_pkey PRIMARY KEY (name)
) WITH ({vacuum});
CREATE OR REPLACE FUNCTION {s}.lock_transaction(text) RETURNS void LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT LIKE 'read %' THEN
        RAISE EXCEPTION 'the transaction would not see what the holder before it wrote; begin it with ISOLATION LEVEL READ COMMITTED'
            USING ERRCODE = 'LH002';
    END IF;
    INSERT INTO {s}.transaction_lock AS l VALUES ($1) ON CONFLICT ON CONSTRAINT transaction_lock_pkey
        DO UPDATE SET name = $1 WHERE false;
END $$;
CREATE OR REPLACE FUNCTION {s}.try_lock_transaction(text) RETURNS bool LANGUAGE plpgsql SET lock_timeout = '100ms'
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM {s}.transaction_lock AS l WHERE l.name = $1 FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND AND EXISTS (SELECT FROM {s}.transaction_lock AS l WHERE l.name = $1) THEN
        RETURN false;
    END IF;
    PERFORM {s}.lock_transaction($1);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;
";

/// The rows are few and change often: they are vacuumed by their number, not by a share of the table, and without pauses.
const VACUUM: &str = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, \
    autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 10000";

/// What the functions of transactions are in the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// The schema: a role that may not create one can use it.
    pub schema: bool,
    /// The function of the fence, in which an administrator may have changed something.
    pub fence: bool,
    /// The functions of transaction locks.
    pub transaction_lock: bool,
}

impl Present {
    /// Nothing is known to be there.
    const NOTHING: Self = Self { schema: false, fence: false, transaction_lock: false };

    /// The query for the three, in this order.
    #[must_use]
    pub fn query(schema: &str) -> Pinned {
        Pinned::new(&format!(
            "SELECT to_regnamespace('{schema}') IS NOT NULL,
            to_regprocedure('{schema}.check_fence(pg_catalog.text, pg_catalog.int8)') IS NOT NULL,
            to_regprocedure('{schema}.try_lock_transaction(pg_catalog.text)') IS NOT NULL"
        ))
    }
}

/// The transaction that creates what is missing.
pub(super) fn create(schema: &str, present: Present) -> Pinned {
    statements(schema, present, TABLES, VIEWS)
}

/// The transaction that creates what transactions of the program use, without the tables of leases.
#[must_use]
pub fn create_for_transactions(schema: &str, present: Present) -> Pinned {
    statements(schema, present, "", "")
}

/// All of the statements, with what an application's role needs.
#[must_use]
pub fn ddl(schema: &str) -> String {
    format!(
        "{}\n-- for each role that uses the locks:\n\
         -- GRANT USAGE ON SCHEMA {schema} TO app;\n\
         -- GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO app;\n",
        create(schema, Present::NOTHING).as_str()
    )
}

/// The query for what in the schema depends on operators, functions or types that are neither the server's nor the schema's own.
pub(super) fn strange(schema: &str) -> Pinned {
    Pinned::new(&format!(
        "SELECT string_agg(DISTINCT pg_describe_object(d.classid, d.objid, 0), ', ')
        FROM pg_catalog.pg_depend AS d
        LEFT JOIN pg_catalog.pg_rewrite AS w ON d.classid = 'pg_catalog.pg_rewrite'::regclass::oid AND w.oid = d.objid
        LEFT JOIN pg_catalog.pg_constraint AS k ON d.classid = 'pg_catalog.pg_constraint'::regclass::oid AND k.oid = d.objid
        JOIN pg_catalog.pg_class AS c ON c.relnamespace = to_regnamespace('{schema}')::oid
            AND c.relname::text = ANY ('{{{RELATIONS}}}'::text[]) AND c.oid = coalesce(w.ev_class, k.conrelid, d.objid)
        LEFT JOIN pg_catalog.pg_operator AS o ON d.refclassid = 'pg_catalog.pg_operator'::regclass::oid AND o.oid = d.refobjid
        LEFT JOIN pg_catalog.pg_proc AS p ON d.refclassid = 'pg_catalog.pg_proc'::regclass::oid AND p.oid = d.refobjid
        LEFT JOIN pg_catalog.pg_type AS t ON d.refclassid = 'pg_catalog.pg_type'::regclass::oid AND t.oid = d.refobjid
        WHERE coalesce(o.oprnamespace, p.pronamespace, t.typnamespace)
            <> ALL (('{{' || 'pg_catalog'::regnamespace::oid::text || ',' || c.relnamespace::text || '}}')::oid[])"
    ))
}

/// The tables and views, and the functions, in the schema.
pub(super) const RELATIONS: &str =
    "layout,resource,lease,waiter,tombstone,mail,fence,transaction_lock,holders,waiters";
/// With the numbers of their argument types, as `pg_proc` has them: 25 is text, and 20 is int8. A function of the same name with other
/// arguments is not leasehold's, and no statement calls it.
const FUNCTIONS: &str = "check_fence 25 20,lock_transaction 25,try_lock_transaction 25";

/// The query for what belongs to a role that this one cannot trust, and for triggers and rules, which run with the rights of this role and may
/// be of any role with a right to the tables: one text, or NULL. It reads nothing of the schema's own, where such code could be. Trusted are
/// this role, superusers, `owner`, which the address names, and the owner of the database, unless this session has or may get a right that
/// reaches beyond the database, and that owner has not: an attribute such as CREATEROLE, or a role of the server itself, such as
/// `pg_execute_server_program`. That this role is a member of another one says nothing else: it was not asked.
#[must_use]
pub fn foreign_owners(schema: &str, owner: Option<&str>) -> Pinned {
    let owner = owner.unwrap_or_default();
    Pinned::new(&format!(
        "SELECT string_agg(found, ', ') FROM (
        SELECT DISTINCT what || ' belongs to ' || quote_ident(r.rolname::text) AS found FROM (
            SELECT 'the schema {schema}' AS what, nspowner AS owner FROM pg_catalog.pg_namespace
                WHERE oid = to_regnamespace('{schema}')::oid
            UNION ALL
            SELECT '{schema}.' || relname::text, relowner FROM pg_catalog.pg_class
                WHERE relnamespace = to_regnamespace('{schema}')::oid AND relname::text = ANY ('{{{RELATIONS}}}'::text[])
            UNION ALL
            SELECT 'the function {schema}.' || proname::text, proowner FROM pg_catalog.pg_proc
                WHERE pronamespace = to_regnamespace('{schema}')::oid
                AND (proname::text || ' ' || proargtypes::text) = ANY ('{{{FUNCTIONS}}}'::text[])
        ) AS o JOIN pg_catalog.pg_roles AS r ON r.oid = o.owner
        JOIN pg_catalog.pg_roles AS own ON own.rolname::text = current_user::text
        JOIN pg_catalog.pg_database AS d ON d.datname::text = current_database()::text
        WHERE NOT (r.rolsuper OR r.oid = own.oid OR r.rolname::text = '{owner}' OR (r.oid = d.datdba OR r.rolname::text = 'pg_database_owner')
            AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS s
                WHERE (pg_has_role(current_user, s.oid, 'MEMBER') OR pg_has_role(session_user, s.oid, 'MEMBER'))
                AND (s.rolsuper OR s.rolcreaterole OR s.rolreplication OR s.rolbypassrls OR s.oid < 16384::oid)
                AND s.rolname::text <> 'pg_database_owner' AND NOT pg_has_role(d.datdba, s.oid, 'MEMBER')))
        UNION
        SELECT 'the trigger ' || quote_ident(t.tgname::text) || ' on {schema}.' || c.relname::text
            FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid
            WHERE NOT t.tgisinternal AND c.relnamespace = to_regnamespace('{schema}')::oid
            AND c.relname::text = ANY ('{{{RELATIONS}}}'::text[])
        UNION
        SELECT 'the rule ' || quote_ident(w.rulename::text) || ' on {schema}.' || c.relname::text
            FROM pg_catalog.pg_rewrite AS w JOIN pg_catalog.pg_class AS c ON c.oid = w.ev_class
            WHERE w.rulename::text <> '_RETURN' AND c.relnamespace = to_regnamespace('{schema}')::oid
            AND c.relname::text = ANY ('{{{RELATIONS}}}'::text[])
        ) AS strange"
    ))
}

fn statements(schema: &str, present: Present, tables: &str, views: &str) -> Pinned {
    let create = if present.schema { "" } else { "\nCREATE SCHEMA IF NOT EXISTS {s};" };
    let fence = if present.fence { "" } else { FENCE };
    let transaction_lock = if present.transaction_lock { "" } else { TRANSACTION_LOCK };
    let as_text = |views: String, column: &str| {
        let text = format!(
            "CASE WHEN position(decode('00', 'hex') IN {column}) = 0 THEN convert_from({column}, 'UTF8')
            ELSE encode({column}, 'escape') END"
        );
        views.replace(&format!("{{text {column}}}"), &text)
    };
    let columns = ["owner", "metadata", "l.owner", "l.metadata", "w.metadata"];
    let views = columns.into_iter().fold(views.to_owned(), as_text);
    let statements = format!("{create}{tables}{fence}{transaction_lock}{views}")
        .replace("{vacuum}", VACUUM)
        .replace("{s}", schema)
        .replace("{layout}", &LAYOUT.to_string());
    Pinned::transaction(&statements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_of_everything_that_is_created_is_checked() {
        let statements = ddl("s");
        let created = |kinds: &[&str]| -> Vec<String> {
            let lines = statements.lines().map(str::trim_start);
            let after = lines.filter_map(|line| {
                let what =
                    line.strip_prefix("CREATE ")?.replace("OR REPLACE ", "").replace("IF NOT EXISTS ", "");
                let (kind, rest) = what.split_once(" s.")?;
                let (name, arguments) = rest.split_once([' ', '(']).unwrap();
                let types = arguments.split(')').next().unwrap().replace("text", "25").replace("int8", "20");
                let signature = format!("{name} {}", types.replace(',', ""));
                kinds.contains(&kind).then(|| if kind == "FUNCTION" { signature } else { name.to_owned() })
            });
            after.collect()
        };
        let (relations, functions) = (created(&["TABLE", "VIEW"]), created(&["FUNCTION"]));
        for (found, checked) in [(relations, RELATIONS), (functions, FUNCTIONS)] {
            let mut checked: Vec<_> = checked.split(',').collect();
            checked.sort_unstable();
            let mut found: Vec<_> = found.iter().map(String::as_str).collect();
            found.sort_unstable();
            assert_eq!(found, checked);
        }
    }
}
