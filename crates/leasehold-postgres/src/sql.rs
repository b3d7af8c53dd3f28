//! The statements. `{s}` is the schema, and `{now}` the server's clock in microseconds. `pinned.rs` adds the schema of what they call.
//!
//! A statement sees the rows that were committed when it began. One that waited for a row lock sees the locked row as it is
//! now, and all others as they were before. So the lock is a statement of its own, and whatever else a transaction reads comes
//! after it. For the same reason the clock is read in a projection above the lock, never beside it: below, it would be read
//! before the wait. Times of one resource, and its tokens, then have the order of its row lock.

use super::pinned::Pinned;
use super::query::Query;
use super::rights;

/// Microseconds since 1970.
const CLOCK: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";

const LEASE: &str =
    "client, sequence, inbox, owner, weight, token, granted_at, expires_at, claimed, kept, metadata";
const WAITER: &str = "place, client, sequence, inbox, owner, weight, ttl, reserve, since, deadline, parked, metadata, replaces, \
    polls, secret";
const HEADER: &str = "id, capacity, in_use, last_token, next_place, head, leases, waiters, parked, tombstones, next_expiry, \
    remember_until";

/// The resource's key.
const ID: &str = "(SELECT id FROM {s}.resource WHERE name = $1 AND kind = $2)";

/// Whether the lock of a client that listens is held. If it is not, this statement has it for a moment, and not for the
/// transaction: another one that looks meanwhile would take the client for present.
const PRESENT: &str =
    "CASE WHEN pg_try_advisory_lock({presence}) THEN NOT pg_advisory_unlock({presence}) ELSE true END";

/// The key of that lock. Every role can see it, and not the client's id.
const PRESENCE: &str = "('x' || encode(substring(sha256(recipient), 1, 8), 'hex'))::bit(64)::int8";

/// LISTEN takes no parameter, and the statistics of statements keep its text. So each client would be an entry there.
const LISTEN: &str = "DO $$ BEGIN EXECUTE format('LISTEN %I', current_setting('leasehold.channel')); END $$";

/// An uncontended acquire. `$5` is the number of tokens to reserve, which are given only while the last one is not ahead of the
/// clock: a standby that did not receive it would otherwise give tokens again.
const ACQUIRE: &str = "
INSERT INTO {s}.resource AS r (name, kind, capacity, in_use, last_token, leases, next_expiry, remember_until, visit,
    {lease})
SELECT $1, $2, $3, $4, f + $5, 1, t + $6, greatest(f + $5 + 1, t + {retention}), t + {retention},
    $7, $8, $9, $10, $4, f, t, t + $6, true, false, $11
FROM (SELECT t, least(t, {max_wall}) AS f FROM (SELECT {now} AS t OFFSET 0) AS clock OFFSET 0) AS new
ON CONFLICT (name, kind) DO UPDATE SET (capacity, in_use, last_token, leases, next_expiry, remember_until,
    {lease}) = (
    SELECT $3, $4, f + n, 1, t + $6, greatest(f + n + 1, t + {retention}),
        $7, $8, $9, $10, $4, f, t, t + $6, true, false, $11
    FROM (SELECT t, greatest(r.last_token + 1, least(t, {max_wall})) AS f,
            CASE WHEN r.last_token <= t THEN $5 ELSE 0 END AS n
        FROM (SELECT {now} AS t OFFSET 0) AS clock OFFSET 0) AS next)
WHERE r.leases = 0 AND r.waiters = 0 AND r.tombstones = 0
RETURNING granted_at, token, last_token";

/// A release of the only lease, which has no waiter.
const RELEASE: &str = "
UPDATE {s}.resource AS r SET in_use = 0, leases = 0, next_expiry = {never}, client = NULL, sequence = NULL, inbox = NULL,
    owner = NULL, metadata = NULL, remember_until = greatest(remember_until, {now} + {retention})
WHERE name = $1 AND kind = $2 AND client = $3 AND sequence = $4 AND NOT kept AND leases = 1 AND waiters = 0
    AND tombstones = 0 AND expires_at > {now}
RETURNING {now}";

/// Renewals of leases in their resources' rows, if nothing else happens at the resource. A row that is locked is left out, so that
/// it delays no other.
const RENEW: &str = "
WITH held AS MATERIALIZED (
    SELECT r.id, w.ttl FROM ROWS FROM (unnest($1::text[]), unnest($2::text[]), unnest($3::bytea[]), unnest($4::int8[]),
        unnest($5::int8[]), unnest($6::int8[])) AS w (name, kind, client, sequence, ttl, token)
    JOIN {s}.resource AS r ON r.name = w.name AND r.kind = w.kind AND r.client = w.client AND r.sequence = w.sequence
        AND (w.token = 0 OR r.token = w.token)
    FOR NO KEY UPDATE OF r SKIP LOCKED
), clock AS MATERIALIZED (SELECT {now} AS t FROM (SELECT count(*) AS n FROM held) AS locked WHERE n >= 0)
UPDATE {s}.resource AS r SET granted_at = least(r.granted_at, t), expires_at = t + ttl, claimed = true,
    next_expiry = CASE WHEN r.leases = 1 AND r.waiters = 0 AND r.tombstones = 0 THEN t + ttl
        ELSE least(r.next_expiry, t + ttl) END
FROM held, clock
WHERE r.id = held.id AND NOT r.kept AND r.parked = 0 AND r.next_expiry > t AND r.leases > 0
RETURNING r.name, r.kind, t, r.waiters > r.parked";

const LOCK: &str = "
SELECT {now}, {header}, {lease} FROM (SELECT 1) AS one
LEFT JOIN (SELECT {header}, {lease} FROM {s}.resource WHERE name = $1 AND kind = $2 FOR NO KEY UPDATE) AS r ON true";

const PEEK: &str = "
SELECT {now}, {header}, {lease} FROM (SELECT 1) AS one
LEFT JOIN (SELECT {header}, {lease} FROM {s}.resource WHERE name = $1 AND kind = $2) AS r ON true";

/// Steps from client to client in the index, so the cost does not depend on the number of entries per client. All entries of a
/// client are parked together.
const READY_CLIENTS: &str = "
WITH RECURSIVE resource (id) AS (SELECT {id}), each (client) AS (
    (SELECT recipient FROM {s}.waiter WHERE resource = (SELECT id FROM resource) ORDER BY recipient LIMIT 1)
    UNION ALL
    SELECT (SELECT w.recipient FROM {s}.waiter AS w
        WHERE w.resource = (SELECT id FROM resource) AND w.recipient > each.client ORDER BY w.recipient LIMIT 1)
    FROM each WHERE each.client IS NOT NULL
)
SELECT count(*) FROM each WHERE client IS NOT NULL AND NOT (SELECT parked FROM {s}.waiter AS w
    WHERE w.resource = (SELECT id FROM resource) AND w.recipient = each.client LIMIT 1)";

/// Pushes to the clients of which `$3` says that they cannot listen, and for those that do not listen now.
const POST: &str = "
INSERT INTO {s}.mail (client, message, at) SELECT recipient, message, {now}
FROM ROWS FROM (unnest($1::bytea[]), unnest($2::text[]), unnest($3::int8[])) AS n (recipient, message, polls) WHERE polls = 1 OR NOT ({present})";

/// The pushes to a client, and as the row 0 when the server was started: behind a pooler nothing else shows that it is another one.
const READ_PUSHES: &str = "
WITH taken AS (DELETE FROM {s}.mail WHERE client = $1 RETURNING id, message)
SELECT id, message FROM taken UNION ALL SELECT 0, extract(epoch FROM pg_postmaster_start_time())::text";

/// The same for a role that may not ask when the server was started.
const READ_PUSHES_ONLY: &str = "DELETE FROM {s}.mail WHERE client = $1 RETURNING id, message";

/// A row is looked at `{margin}` after its visit is due. It is removed if it is unused, and was forgotten for as long: an acquire
/// that read the clock before, and inserts the row again, has ended then.
const SWEEP: &str = "
WITH due AS MATERIALIZED (
    SELECT id, leases + waiters + tombstones = 0 AND remember_until + {margin} <= t AS is_unused, remember_until, t
    FROM (SELECT id, leases, waiters, tombstones, remember_until, {now} AS t FROM {s}.resource
        WHERE visit <= (SELECT {now} - {margin}) ORDER BY visit LIMIT $1 FOR UPDATE SKIP LOCKED) AS found
), removed AS (
    DELETE FROM {s}.resource AS r USING due WHERE r.id = due.id AND is_unused
), kept AS (
    UPDATE {s}.resource AS r SET visit = greatest(due.remember_until, t) FROM due WHERE r.id = due.id AND NOT is_unused
)
SELECT count(*) FROM due";

/// The text of every statement, in one schema.
#[derive(Debug)]
pub(super) struct Sql {
    pub(super) acquire: Pinned,
    pub(super) release: Pinned,
    pub(super) renew: Pinned,
    /// Limits the transaction's waits for rows further.
    pub(super) limit_waits: Pinned,
    pub(super) lock: Pinned,
    pub(super) peek: Pinned,
    pub(super) put_resource: Pinned,
    pub(super) put_lease: Pinned,
    pub(super) remove_lease: Pinned,
    pub(super) put_waiter: Pinned,
    pub(super) remove_waiter: Pinned,
    pub(super) set_parked: Pinned,
    pub(super) put_tombstone: Pinned,
    pub(super) remove_tombstones: Pinned,
    pub(super) notify: Pinned,
    pub(super) post: Pinned,
    pub(super) read_pushes: Pinned,
    pub(super) read_pushes_only: Pinned,
    pub(super) remove_pushes: Pinned,
    pub(super) create_all: Pinned,
    pub(super) list: Pinned,
    pub(super) due: Pinned,
    pub(super) sweep: Pinned,
    /// Takes the lock of a client that listens. It does not wait for it: any role may hold it, and a session that waits stays when its
    /// client is gone.
    pub(super) attend: Pinned,
    /// Removes the row of a lock that is not in use, whose name is of no use again.
    pub(super) forget: Pinned,
    /// What the role lacks.
    pub(super) lacking: Pinned,
    queries: Queries,
}

#[derive(Debug)]
struct Queries {
    lease: Pinned,
    expiring: Pinned,
    of_owner: Pinned,
    all_leases: Pinned,
    waiter: Pinned,
    ready: Pinned,
    deadlines: Pinned,
    of_client: Pinned,
    count_of: Pinned,
    ready_clients: Pinned,
    all_waiters: Pinned,
    tombstone: Pinned,
    all_tombstones: Pinned,
    present: Pinned,
    create: Pinned,
}

impl Sql {
    /// `now` replaces the server's clock in tests.
    pub(super) fn new(schema: &str, now: Option<&str>) -> Self {
        let text = |template: &str| {
            let template = template
                .replace("{present}", PRESENT)
                .replace("{presence}", PRESENCE)
                .replace("{header}", HEADER)
                .replace("{lease}", LEASE)
                .replace("{waiter}", WAITER)
                .replace("{id}", ID)
                .replace("{s}", schema);
            let statement = template
                .replace("{now}", now.unwrap_or(CLOCK))
                .replace("{retention}", &super::limits::RETENTION_MICROS.to_string())
                .replace("{max_wall}", &super::limits::MAX_WALL.to_string())
                .replace("{margin}", &super::limits::SWEEP_MARGIN_MICROS.to_string())
                .replace("{never}", &i64::MAX.to_string());
            Pinned::new(&statement)
        };
        Self {
            acquire: text(ACQUIRE),
            release: text(RELEASE),
            renew: text(RENEW),
            limit_waits: text("SELECT set_config('lock_timeout', $1, true)"),
            lock: text(LOCK),
            peek: text(PEEK),
            put_resource: text(
                "UPDATE {s}.resource SET capacity = $2, in_use = $3, last_token = $4, next_place = $5, head = $6,
                leases = $7, waiters = $8, parked = $9, tombstones = $10, next_expiry = $11, remember_until = $12,
                client = $13, sequence = $14, inbox = $15, owner = $16, weight = $17, token = $18, granted_at = $19,
                expires_at = $20, claimed = $21, kept = $22, metadata = $23 WHERE id = $1",
            ),
            put_lease: text(
                "INSERT INTO {s}.lease (resource, {lease}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
                ON CONFLICT (resource, client, sequence) DO UPDATE SET inbox = $4, owner = $5, weight = $6, token = $7,
                granted_at = $8, expires_at = $9, claimed = $10, kept = $11, metadata = $12",
            ),
            remove_lease: text(
                "DELETE FROM {s}.lease WHERE resource = $1 AND client = $2 AND sequence = $3",
            ),
            put_waiter: text(
                "INSERT INTO {s}.waiter (resource, {waiter})
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
                ON CONFLICT (resource, place) DO UPDATE
                SET inbox = $5, deadline = $11, parked = $12, metadata = $13, polls = $15, secret = $16",
            ),
            remove_waiter: text(
                "DELETE FROM {s}.waiter WHERE resource = $1 AND client = $2 AND sequence = $3",
            ),
            set_parked: text(
                "UPDATE {s}.waiter SET parked = $3 WHERE resource = $1 AND recipient = $2 AND parked <> $3",
            ),
            put_tombstone: text(
                "INSERT INTO {s}.tombstone VALUES ($1, $2, $3, $4)
                ON CONFLICT (resource, client, sequence) DO UPDATE SET until = $4",
            ),
            remove_tombstones: text("DELETE FROM {s}.tombstone WHERE resource = $1 AND until <= $2"),
            notify: text(
                "SELECT pg_notify(n.channel, n.message)
                FROM ROWS FROM (unnest($1::text[]), unnest($2::text[])) AS n (channel, message)",
            ),
            post: text(POST),
            read_pushes: text(READ_PUSHES),
            read_pushes_only: text(READ_PUSHES_ONLY),
            remove_pushes: text("DELETE FROM {s}.mail WHERE at < ({now} - $1)"),
            create_all: text(
                "INSERT INTO {s}.resource (name, kind, visit)
                SELECT name, kind, {now} + {retention} FROM ROWS FROM (unnest($1::text[]), unnest($2::text[]))
                    WITH ORDINALITY AS n (name, kind, place) ORDER BY place
                ON CONFLICT (name, kind) DO NOTHING",
            ),
            list: text(
                // Not by an index, in whose order a million rows would be read one by one.
                "WITH used AS MATERIALIZED (
                    SELECT kind, name FROM {s}.resource WHERE leases > 0 OR waiters > 0 OR tombstones > 0
                ) SELECT kind, name FROM used ORDER BY name, kind",
            ),
            due: text(
                "SELECT kind, name FROM {s}.resource WHERE visit <= (SELECT {now}) AND (leases > 0 OR waiters > 0 OR tombstones > 0)
                AND next_expiry <= {now} ORDER BY visit LIMIT $1 OFFSET $2",
            ),
            sweep: text(SWEEP),
            attend: text(
                "SELECT pg_try_advisory_lock_shared({presence}) FROM (SELECT $1::bytea AS recipient) AS one",
            ),
            forget: text(
                "DELETE FROM {s}.resource WHERE name = $1 AND kind = $2 AND leases = 0 AND waiters = 0 AND tombstones = 0",
            ),
            lacking: rights::query(schema),
            queries: Queries::new(&text),
        }
    }

    /// Listens to the channel in a session that has these settings.
    pub(super) fn listen(channel: &str, settings: &str) -> Pinned {
        let channel = format!("SELECT set_config('leasehold.channel', '{channel}', true)");
        Pinned::new(&format!("{settings} {channel}; {LISTEN}"))
    }

    pub(super) fn of(&self, query: &Query) -> &Pinned {
        let queries = &self.queries;
        match query {
            Query::Lease(_) => &queries.lease,
            Query::Expiring(_) => &queries.expiring,
            Query::OfOwner(..) => &queries.of_owner,
            Query::AllLeases => &queries.all_leases,
            Query::Waiter(_) => &queries.waiter,
            Query::Ready(_) => &queries.ready,
            Query::Deadlines(_) => &queries.deadlines,
            Query::OfClient(..) => &queries.of_client,
            Query::CountOf(_) => &queries.count_of,
            Query::ReadyClients => &queries.ready_clients,
            Query::AllWaiters => &queries.all_waiters,
            Query::Tombstone(_) => &queries.tombstone,
            Query::AllTombstones => &queries.all_tombstones,
            Query::Present(_) => &queries.present,
            Query::Create => &queries.create,
        }
    }
}

impl Queries {
    fn new(text: &impl Fn(&str) -> Pinned) -> Self {
        let lease =
            |rest: &str| text(&format!("SELECT {{lease}} FROM {{s}}.lease WHERE resource = {{id}} {rest}"));
        let waiter =
            |rest: &str| text(&format!("SELECT {{waiter}} FROM {{s}}.waiter WHERE resource = {{id}} {rest}"));
        Self {
            lease: lease("AND client = $3 AND sequence = $4"),
            expiring: lease("ORDER BY expires_at, client, sequence LIMIT $3"),
            of_owner: lease("AND owner = $3 ORDER BY weight DESC, client DESC, sequence DESC LIMIT $4"),
            all_leases: lease(""),
            waiter: waiter("AND client = $3 AND sequence = $4"),
            ready: text(
                "SELECT {waiter}, {present} FROM (SELECT {waiter}, recipient FROM {s}.waiter
                WHERE resource = {id} AND NOT parked ORDER BY place LIMIT $3) AS first ORDER BY place",
            ),
            deadlines: waiter("ORDER BY deadline, place LIMIT $3"),
            of_client: waiter("AND recipient = $3 ORDER BY place LIMIT $4"),
            count_of: text(
                "SELECT count(*), coalesce(bool_or(parked), false) FROM {s}.waiter WHERE resource = {id} AND recipient = $3",
            ),
            ready_clients: text(READY_CLIENTS),
            all_waiters: waiter("ORDER BY place"),
            tombstone: text(
                "SELECT client, sequence, until FROM {s}.tombstone WHERE resource = {id} AND client = $3 AND sequence = $4",
            ),
            all_tombstones: text("SELECT client, sequence, until FROM {s}.tombstone WHERE resource = {id}"),
            present: text("SELECT {present} FROM (SELECT $1::bytea AS recipient) AS one"),
            create: text(
                "INSERT INTO {s}.resource (name, kind, visit) VALUES ($1, $2, {now} + {retention}) RETURNING id",
            ),
        }
    }
}
