//! The rows of one resource in the file. Each method is one statement, and none decides anything.

mod columns;

use leasehold_core::model::{Header, Lease, Rows, TOKEN_RETENTION, Waiter};
use leasehold_core::{Acquisition, ClientId, Kind, Owner, Resource, StoreTime};
use rusqlite::{Connection, OptionalExtension, Params, Result, Row, params};

use columns::{LastToken, Number, Time, key, read_lease, read_waiter};

/// First visit of a row that is inserted now.
fn first_visit(wall: StoreTime) -> StoreTime {
    wall + TOKEN_RETENTION
}

/// One resource inside of one transaction.
pub(super) struct SqliteRows<'c> {
    connection: &'c Connection,
    resource: &'c Resource,
    /// Its key, once it has been looked up or made.
    id: Option<i64>,
    /// So many can hold it that the lease which expires first is found by an index.
    pub(super) is_shared: bool,
    /// The wall clock, by which a new row gets its first visit.
    wall: StoreTime,
    /// The resource got its row here.
    pub(super) is_created: bool,
}

impl<'c> SqliteRows<'c> {
    pub(super) fn new(connection: &'c Connection, resource: &'c Resource, wall: StoreTime) -> Self {
        let is_shared = resource.kind != Kind::Mutex;
        Self { connection, resource, id: None, is_shared, wall, is_created: false }
    }

    fn run(&self, sql: &str, params: impl Params) -> Result<usize> {
        self.connection.prepare_cached(sql)?.execute(params)
    }

    fn one<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        self.connection.prepare_cached(sql)?.query_row(params, read).optional()
    }

    fn count(&self, sql: &str, params: impl Params) -> Result<u32> {
        Ok(self.one(sql, params, |row| row.get(0))?.unwrap_or(0))
    }

    /// The resource's key for look-ups. If the resource is not stored, a key that no row has.
    fn known_id(&self) -> i64 {
        self.id.unwrap_or(0)
    }

    /// The resource's key. A resource that is not stored yet gets a row with an empty header, which is written later.
    fn id(&mut self) -> Result<i64> {
        if let Some(id) = self.id {
            return Ok(id);
        }
        let sql = "INSERT INTO resource VALUES (NULL, ?, ?, 0, 0, 0, 1, 0, 0, 0, 0, 0, ?, 0, ?)";
        let (never, visit) = (Time(StoreTime::NEVER), Time(first_visit(self.wall)));
        self.run(sql, params![self.resource.kind.as_str(), self.resource.name.as_str(), never, visit])?;
        self.is_created = true;
        let id = self.connection.last_insert_rowid();
        self.id = Some(id);
        Ok(id)
    }
}

macro_rules! select_lease {
    ($rest:literal) => {
        concat!(
            "SELECT client, sequence, owner, weight, token, granted_at, expires_at, claimed, kept, metadata, inbox
            FROM lease WHERE resource = ? ",
            $rest
        )
    };
}

macro_rules! select_waiter {
    ($rest:literal) => {
        concat!(
            "SELECT place, client, sequence, owner, weight, ttl, reserve, since, deadline, parked, metadata,
            replaces, secret, inbox FROM waiter WHERE resource = ? ",
            $rest
        )
    };
}

/// Steps from client to client in the index, so the cost does not depend on the number of entries per client. All entries of a
/// client are parked together.
const COUNT_READY_CLIENTS: &str = "
    WITH RECURSIVE each (inbox) AS (
        SELECT MIN(inbox) FROM waiter WHERE resource = ?1
        UNION ALL
        SELECT (SELECT MIN(inbox) FROM waiter WHERE resource = ?1 AND inbox > each.inbox)
        FROM each WHERE each.inbox IS NOT NULL
    )
    SELECT COUNT(*) FROM each
    WHERE (SELECT parked FROM waiter WHERE resource = ?1 AND inbox = each.inbox LIMIT 1) = 0";

impl Rows for SqliteRows<'_> {
    type Error = rusqlite::Error;

    fn header(&mut self) -> Result<Option<Header>> {
        let sql =
            "SELECT id, capacity, in_use, last_token, next_place, head, leases, waiters, parked, tombstones,
            next_expiry, remember_until FROM resource WHERE name = ? AND kind = ?";
        let key = params![self.resource.name.as_str(), self.resource.kind.as_str()];
        let found = self.one(sql, key, |row| {
            let header = Header {
                capacity: row.get(1)?,
                in_use: row.get(2)?,
                last_token: row.get::<_, LastToken>(3)?.0,
                next_place: row.get::<_, Number>(4)?.0,
                head: row.get::<_, Number>(5)?.0,
                leases: row.get(6)?,
                waiters: row.get(7)?,
                parked: row.get(8)?,
                tombstones: row.get(9)?,
                next_expiry: row.get::<_, Time>(10)?.0,
                remember_until: row.get::<_, Time>(11)?.0,
            };
            Ok((row.get(0)?, header))
        })?;
        Ok(found.map(|(id, header)| {
            self.id = Some(id);
            header
        }))
    }

    fn put_header(&mut self, header: &Header) -> Result<()> {
        let sql = "UPDATE resource SET capacity = ?, in_use = ?, last_token = ?, next_place = ?, head = ?, leases = ?,
            waiters = ?, parked = ?, tombstones = ?, next_expiry = ?, remember_until = ? WHERE id = ?";
        let id = self.id()?;
        let (last_token, next_place) = (Number(header.last_token), Number(header.next_place));
        let (next_expiry, remember_until) = (Time(header.next_expiry), Time(header.remember_until));
        self.run(
            sql,
            params![
                header.capacity,
                header.in_use,
                last_token,
                next_place,
                Number(header.head),
                header.leases,
                header.waiters,
                header.parked,
                header.tombstones,
                next_expiry,
                remember_until,
                id
            ],
        )?;
        Ok(())
    }

    fn remove_header(&mut self) -> Result<()> {
        let id = self.id()?;
        self.run("DELETE FROM resource WHERE id = ?", [id])?;
        self.id = None;
        Ok(())
    }

    fn lease(&mut self, acquisition: Acquisition) -> Result<Option<Lease>> {
        let sql = select_lease!("AND client = ? AND sequence = ?");
        let (client, sequence) = key(acquisition);
        self.one(sql, params![self.known_id(), client, sequence], read_lease)
    }

    fn put_lease(&mut self, lease: Lease) -> Result<()> {
        let (client, sequence) = key(lease.acquisition);
        let id = self.id()?;
        self.run(
            "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                id,
                client,
                sequence,
                lease.owner.as_ref().map(Owner::as_str),
                lease.weight,
                Number(lease.token.get()),
                Time(lease.granted_at),
                Time(lease.expires_at),
                lease.claimed,
                lease.retained,
                &*lease.metadata,
                self.is_shared,
                lease.inbox.map(|inbox| inbox.get().to_be_bytes())
            ],
        )?;
        Ok(())
    }

    fn remove_lease(&mut self, acquisition: Acquisition) -> Result<()> {
        let (client, sequence) = key(acquisition);
        let id = self.id()?;
        self.run(
            "DELETE FROM lease WHERE resource = ? AND client = ? AND sequence = ?",
            params![id, client, sequence],
        )?;
        Ok(())
    }

    fn first_expiring_lease(&mut self) -> Result<Option<Lease>> {
        let few = select_lease!("ORDER BY expires_at, client, sequence LIMIT 1");
        let many = select_lease!("AND shared = 1 ORDER BY expires_at, client, sequence LIMIT 1");
        let sql = if self.is_shared { many } else { few };
        self.one(sql, [self.known_id()], read_lease)
    }

    fn heaviest_lease_of(&mut self, owner: &Owner) -> Result<Option<Lease>> {
        let sql = select_lease!("AND owner = ? ORDER BY weight DESC, client DESC, sequence DESC LIMIT 1");
        self.one(sql, params![self.known_id(), owner.as_str()], read_lease)
    }

    fn each_lease(&mut self, see: &mut dyn FnMut(Lease)) -> Result<()> {
        let id = self.known_id();
        let sql = select_lease!("");
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut rows = statement.query([id])?;
        while let Some(row) = rows.next()? {
            see(read_lease(row)?);
        }
        Ok(())
    }

    fn waiter(&mut self, acquisition: Acquisition) -> Result<Option<Waiter>> {
        let sql = select_waiter!("AND client = ? AND sequence = ?");
        let (client, sequence) = key(acquisition);
        self.one(sql, params![self.known_id(), client, sequence], read_waiter)
    }

    fn put_waiter(&mut self, waiter: Waiter) -> Result<()> {
        let (client, sequence) = key(waiter.acquisition);
        let id = self.id()?;
        self.run(
            "INSERT OR REPLACE INTO waiter VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                id,
                Number(waiter.place),
                client,
                sequence,
                waiter.owner.as_ref().map(Owner::as_str),
                waiter.weight,
                Number(u64::try_from(waiter.ttl.as_micros()).unwrap_or(u64::MAX)),
                waiter.reserve,
                Time(waiter.since),
                Time(waiter.deadline),
                waiter.parked,
                &*waiter.metadata,
                waiter.replaces.map(Number),
                waiter.secret.bytes(),
                waiter.inbox().get().to_be_bytes()
            ],
        )?;
        Ok(())
    }

    fn remove_waiter(&mut self, acquisition: Acquisition) -> Result<()> {
        let (client, sequence) = key(acquisition);
        let id = self.id()?;
        self.run(
            "DELETE FROM waiter WHERE resource = ? AND client = ? AND sequence = ?",
            params![id, client, sequence],
        )?;
        Ok(())
    }

    fn first_ready_waiter(&mut self) -> Result<Option<Waiter>> {
        let sql = select_waiter!("AND parked = 0 ORDER BY place LIMIT 1");
        self.one(sql, [self.known_id()], read_waiter)
    }

    fn first_expiring_waiter(&mut self) -> Result<Option<Waiter>> {
        let sql = select_waiter!("ORDER BY deadline, place LIMIT 1");
        self.one(sql, [self.known_id()], read_waiter)
    }

    fn set_parked(&mut self, client: ClientId, parked: bool) -> Result<u32> {
        let id = self.id()?;
        let sql = "UPDATE waiter SET parked = ? WHERE resource = ? AND inbox = ? AND parked <> ?";
        let changed = self.run(sql, params![parked, id, client.get().to_be_bytes(), parked])?;
        Ok(u32::try_from(changed).unwrap_or(u32::MAX))
    }

    fn ready_clients(&mut self) -> Result<u32> {
        self.count(COUNT_READY_CLIENTS, [self.known_id()])
    }

    fn waiters_of(&mut self, client: ClientId) -> Result<u32> {
        let sql = "SELECT COUNT(*) FROM waiter WHERE resource = ? AND inbox = ?";
        self.count(sql, params![self.known_id(), client.get().to_be_bytes()])
    }

    fn each_waiter(&mut self, see: &mut dyn FnMut(Waiter)) -> Result<()> {
        let id = self.known_id();
        let sql = select_waiter!("ORDER BY place");
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut rows = statement.query([id])?;
        while let Some(row) = rows.next()? {
            see(read_waiter(row)?);
        }
        Ok(())
    }

    fn tombstone(&mut self, acquisition: Acquisition) -> Result<Option<StoreTime>> {
        let sql = "SELECT until FROM tombstone WHERE resource = ? AND client = ? AND sequence = ?";
        let (client, sequence) = key(acquisition);
        self.one(sql, params![self.known_id(), client, sequence], |row| Ok(row.get::<_, Time>(0)?.0))
    }

    fn put_tombstone(&mut self, acquisition: Acquisition, until: StoreTime) -> Result<()> {
        let (client, sequence) = key(acquisition);
        let id = self.id()?;
        self.run(
            "INSERT OR REPLACE INTO tombstone VALUES (?, ?, ?, ?)",
            params![id, client, sequence, Time(until)],
        )?;
        Ok(())
    }

    fn remove_tombstones(&mut self, now: StoreTime) -> Result<(u32, Option<StoreTime>)> {
        let id = self.id()?;
        let removed =
            self.run("DELETE FROM tombstone WHERE resource = ? AND until <= ?", params![id, Time(now)])?;
        let sql = "SELECT until FROM tombstone WHERE resource = ? ORDER BY until LIMIT 1";
        let next = self.one(sql, [id], |row| Ok(row.get::<_, Time>(0)?.0))?;
        Ok((u32::try_from(removed).unwrap_or(u32::MAX), next))
    }
}
