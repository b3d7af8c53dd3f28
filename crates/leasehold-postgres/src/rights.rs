//! What a role lacks: rights to the tables, and rows that a policy hides. The server names the table of a refused statement, and
//! not the right.

use leasehold_store::StoreError;
use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use super::ddl::RELATIONS;
use super::pinned::Pinned;

/// Each right that commands use. The documented rule grants all four to all tables.
const NEEDED: &str = "{layout SELECT,resource SELECT,resource INSERT,resource UPDATE,resource DELETE,\
    lease SELECT,lease INSERT,lease UPDATE,lease DELETE,waiter SELECT,waiter INSERT,waiter UPDATE,waiter DELETE,\
    tombstone SELECT,tombstone INSERT,tombstone UPDATE,tombstone DELETE,mail SELECT,mail INSERT,mail DELETE}";

/// The query for the statements that grant what this role lacks in the schema.
pub(super) fn query(schema: &str) -> Pinned {
    Pinned::new(&format!(
        "SELECT string_agg(remedy, '; ') FROM (
            SELECT 'GRANT USAGE ON SCHEMA {schema} TO ' || quote_ident(current_user::text) AS remedy
                WHERE NOT has_schema_privilege('{schema}', 'USAGE')
            UNION ALL
            SELECT 'GRANT ' || split_part(needed, ' ', 2) || ' ON {schema}.' || c.relname::text || ' TO '
                    || quote_ident(current_user::text)
                FROM unnest('{NEEDED}'::text[]) AS needed
                JOIN pg_catalog.pg_class AS c ON c.relname::text = split_part(needed, ' ', 1)
                    AND c.relnamespace = to_regnamespace('{schema}')::oid
                WHERE NOT has_table_privilege(c.oid, split_part(needed, ' ', 2))
            UNION ALL
            SELECT 'ALTER TABLE {schema}.' || c.relname::text || ' DISABLE ROW LEVEL SECURITY' || coalesce(
                    (SELECT ' (its policies: ' || string_agg(quote_ident(p.polname::text), ', ') || ')'
                        FROM pg_catalog.pg_policy AS p WHERE p.polrelid = c.oid), '')
                FROM pg_catalog.pg_class AS c
                WHERE c.relnamespace = to_regnamespace('{schema}')::oid AND c.relkind = 'r' AND row_security_active(c.oid)
                AND c.relname::text = ANY ('{{{RELATIONS}}}'::text[])
        ) AS remedies"
    ))
}

/// The query for roles that may read what waiters must keep secret, and are no users of the locks: who may change the rows anyway gains
/// nothing. Superusers and the owner of the tables may do everything.
pub(super) fn readers(schema: &str) -> Pinned {
    Pinned::new(&format!(
        "WITH reader AS MATERIALIZED (
            SELECT r.oid, has_table_privilege(r.oid, w.oid, 'UPDATE') AS writes
                FROM pg_catalog.pg_class AS w, pg_catalog.pg_roles AS r
                WHERE w.relnamespace = to_regnamespace('{schema}')::oid AND w.relname::text = 'waiter' AND w.relkind = 'r'
                AND has_table_privilege(r.oid, w.oid, 'SELECT')
        )
        SELECT string_agg(quote_ident(login.rolname::text), ', ') FROM pg_catalog.pg_roles AS login
            WHERE login.rolcanlogin AND NOT login.rolsuper
            AND EXISTS (SELECT 1 FROM reader WHERE pg_has_role(login.oid, reader.oid, 'MEMBER'))
            AND NOT EXISTS (SELECT 1 FROM reader WHERE reader.writes AND pg_has_role(login.oid, reader.oid, 'MEMBER'))"
    ))
}

/// Whether the server refused a command for a right that the role lacks, or for a policy that would hide rows.
pub(super) fn is_refusal(error: &StoreError) -> bool {
    let error = error.cause.as_ref().and_then(|cause| cause.downcast_ref::<Error>());
    error.is_some_and(|error| error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE))
}

/// Adds to a refusal what would lift it, if anything is lacking.
pub(super) fn explain(refusal: StoreError, remedy: &str) -> StoreError {
    if remedy.is_empty() {
        return refusal;
    }
    let message = format!("{}; what this role lacks: {remedy}", refusal.message);
    refusal.saying(message)
}
