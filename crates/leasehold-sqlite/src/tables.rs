//! The tables of the file.

/// A mutex has few leases: one, or one per acquisition of its owner. Only kinds with many holders need the index `lease_expiry`.
/// A mutex's leases are not in that index (`shared` is 0), so locking a mutex writes one page less. The column `visit` is the
/// time at which the sweep checks whether the resource can be removed; commands do not change it (`sweep.rs`). The column `inbox` is the
/// client that speaks for an attempt; a lease has none if that is the client of its id.
pub(super) const TABLES: &str = "
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE resource (
        id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL,
        capacity INTEGER NOT NULL, in_use INTEGER NOT NULL, last_token INTEGER NOT NULL,
        next_place INTEGER NOT NULL, head INTEGER NOT NULL, leases INTEGER NOT NULL, waiters INTEGER NOT NULL,
        parked INTEGER NOT NULL, tombstones INTEGER NOT NULL, next_expiry INTEGER NOT NULL,
        remember_until INTEGER NOT NULL, visit INTEGER NOT NULL, UNIQUE (name, kind)
    );
    CREATE INDEX resource_visit ON resource (visit);
    CREATE TABLE lease (
        resource INTEGER NOT NULL, client BLOB NOT NULL, sequence INTEGER NOT NULL, owner TEXT,
        weight INTEGER NOT NULL, token INTEGER NOT NULL, granted_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
        claimed INTEGER NOT NULL, kept INTEGER NOT NULL, metadata TEXT NOT NULL, shared INTEGER NOT NULL, inbox BLOB,
        PRIMARY KEY (resource, client, sequence)
    ) WITHOUT ROWID;
    CREATE INDEX lease_expiry ON lease (resource, expires_at) WHERE shared = 1;
    CREATE INDEX lease_owner ON lease (resource, owner, weight) WHERE owner IS NOT NULL;
    CREATE TABLE waiter (
        resource INTEGER NOT NULL, place INTEGER NOT NULL, client BLOB NOT NULL, sequence INTEGER NOT NULL, owner TEXT,
        weight INTEGER NOT NULL, ttl INTEGER NOT NULL, reserve INTEGER NOT NULL, since INTEGER NOT NULL,
        deadline INTEGER NOT NULL, parked INTEGER NOT NULL, metadata TEXT NOT NULL, replaces INTEGER, secret BLOB NOT NULL,
        inbox BLOB NOT NULL, PRIMARY KEY (resource, place)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX waiter_attempt ON waiter (resource, client, sequence);
    CREATE INDEX waiter_inbox ON waiter (resource, inbox);
    CREATE INDEX waiter_ready ON waiter (resource, place) WHERE parked = 0;
    CREATE INDEX waiter_deadline ON waiter (resource, deadline);
    CREATE TABLE tombstone (
        resource INTEGER NOT NULL, client BLOB NOT NULL, sequence INTEGER NOT NULL, until INTEGER NOT NULL,
        PRIMARY KEY (resource, client, sequence)
    ) WITHOUT ROWID;
    CREATE INDEX tombstone_end ON tombstone (resource, until);
";
