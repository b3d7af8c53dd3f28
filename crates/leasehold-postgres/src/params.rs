//! Statements with their parameters, and the rows of the tables as values.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{Header, Lease, Waiter};
use leasehold_core::{Acquisition, ClientId, GrantSecret, Owner, Resource, Token};
use leasehold_store::StoreError;
use leasehold_store::sql::{read_number, read_time, stored_key, stored_number, stored_time};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::base::ResourceRow;
use super::error::damaged;
use super::pinned::Pinned;

/// One parameter, with its type, so that the server need not be asked for it.
#[derive(Clone, Debug)]
pub(super) enum Param {
    Int(Option<i64>),
    Text(String),
    Bytes(Option<Vec<u8>>),
    Bool(Option<bool>),
    Ints(Vec<i64>),
    Texts(Vec<String>),
    ByteLists(Vec<Vec<u8>>),
}

impl Param {
    pub(super) fn typed(&self) -> (&(dyn ToSql + Sync), Type) {
        match self {
            Self::Int(value) => (value, Type::INT8),
            Self::Text(value) => (value, Type::TEXT),
            Self::Bytes(value) => (value, Type::BYTEA),
            Self::Bool(value) => (value, Type::BOOL),
            Self::Ints(value) => (value, Type::INT8_ARRAY),
            Self::Texts(value) => (value, Type::TEXT_ARRAY),
            Self::ByteLists(value) => (value, Type::BYTEA_ARRAY),
        }
    }
}

impl From<i64> for Param {
    fn from(value: i64) -> Self {
        Self::Int(Some(value))
    }
}

impl From<u32> for Param {
    fn from(value: u32) -> Self {
        Self::Int(Some(i64::from(value)))
    }
}

impl From<bool> for Param {
    fn from(value: bool) -> Self {
        Self::Bool(Some(value))
    }
}

impl From<&str> for Param {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<&[u8]> for Param {
    fn from(value: &[u8]) -> Self {
        Self::Bytes(Some(value.to_vec()))
    }
}

impl From<ClientId> for Param {
    fn from(client: ClientId) -> Self {
        Self::Bytes(Some(client.get().to_be_bytes().to_vec()))
    }
}

impl From<Option<ClientId>> for Param {
    fn from(client: Option<ClientId>) -> Self {
        client.map_or(Self::Bytes(None), Self::from)
    }
}

impl From<Option<&Owner>> for Param {
    fn from(owner: Option<&Owner>) -> Self {
        Self::Bytes(owner.map(|owner| owner.as_str().as_bytes().to_vec()))
    }
}

/// One statement of a pipeline.
pub(super) struct Request<'s> {
    pub(super) sql: &'s Pinned,
    pub(super) params: Vec<Param>,
}

impl<'s> Request<'s> {
    pub(super) fn new(sql: &'s Pinned, params: Vec<Param>) -> Self {
        Self { sql, params }
    }
}

/// The parameters that name a resource.
pub(super) fn of_resource(resource: &Resource) -> Vec<Param> {
    vec![resource.name.as_str().into(), resource.kind.as_str().into()]
}

pub(super) fn of_key(acquisition: Acquisition) -> [Param; 2] {
    let (client, sequence) = stored_key(acquisition);
    [client.as_slice().into(), sequence.into()]
}

/// The columns of a lease, in the order of the table.
pub(super) fn of_lease(lease: &Lease) -> Vec<Param> {
    let [client, sequence] = of_key(lease.acquisition);
    vec![
        client,
        sequence,
        lease.inbox.into(),
        lease.owner.as_ref().into(),
        lease.weight.into(),
        stored_number(lease.token.get()).into(),
        stored_time(lease.granted_at).into(),
        stored_time(lease.expires_at).into(),
        lease.claimed.into(),
        lease.retained.into(),
        lease.metadata.as_bytes().into(),
    ]
}

/// The same of no lease.
fn of_no_lease() -> Vec<Param> {
    use Param::{Bool, Bytes, Int};
    vec![
        Bytes(None),
        Int(None),
        Bytes(None),
        Bytes(None),
        Int(None),
        Int(None),
        Int(None),
        Int(None),
        Bool(None),
        Bool(None),
        Bytes(None),
    ]
}

/// The columns of a resource's row.
pub(super) fn of_resource_row(row: &ResourceRow) -> Vec<Param> {
    let header = &row.header;
    let mut params = vec![
        row.id.into(),
        header.capacity.into(),
        header.in_use.into(),
        stored_number(header.last_token).into(),
        stored_number(header.next_place).into(),
        stored_number(header.head).into(),
        header.leases.into(),
        header.waiters.into(),
        header.parked.into(),
        header.tombstones.into(),
        stored_time(header.next_expiry).into(),
        stored_time(header.remember_until).into(),
    ];
    params.extend(row.slot.as_ref().map_or_else(of_no_lease, of_lease));
    params
}

pub(super) fn of_waiter(waiter: &Waiter, polls: bool) -> Vec<Param> {
    let [client, sequence] = of_key(waiter.acquisition);
    vec![
        stored_number(waiter.place).into(),
        client,
        sequence,
        waiter.inbox.into(),
        waiter.owner.as_ref().into(),
        waiter.weight.into(),
        stored_number(micros(waiter.ttl)).into(),
        waiter.reserve.into(),
        stored_time(waiter.since).into(),
        stored_time(waiter.deadline).into(),
        waiter.parked.into(),
        waiter.metadata.as_bytes().into(),
        Param::Int(waiter.replaces.map(stored_number)),
        polls.into(),
        waiter.secret.bytes().as_slice().into(),
    ]
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Reads the columns of a row from left to right.
pub(super) struct Reader<'r> {
    row: &'r Row,
    at: usize,
}

type Read<T> = Result<T, StoreError>;

impl<'r> Reader<'r> {
    pub(super) fn new(row: &'r Row) -> Self {
        Self { row, at: 0 }
    }

    fn next<T: tokio_postgres::types::FromSql<'r>>(&mut self) -> Read<T> {
        let at = self.at;
        self.at += 1;
        self.row.try_get(at).map_err(|_| damaged(self.row.columns()[at].name()))
    }

    fn checked<T>(&self, value: Option<T>) -> Read<T> {
        value.ok_or_else(|| damaged(self.row.columns()[self.at - 1].name()))
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(self.row.try_get::<_, Option<i64>>(self.at), Ok(None))
    }

    pub(super) fn number(&mut self) -> Read<u64> {
        let stored = self.next()?;
        self.checked(read_number(stored))
    }

    fn optional_number(&mut self) -> Read<Option<u64>> {
        let stored: Option<i64> = self.next()?;
        stored.map(|stored| self.checked(read_number(stored))).transpose()
    }

    pub(super) fn id(&mut self) -> Read<i64> {
        self.next()
    }

    pub(super) fn count(&mut self) -> Read<u32> {
        let stored: i64 = self.next()?;
        self.checked(u32::try_from(stored).ok())
    }

    pub(super) fn time(&mut self) -> Read<leasehold_core::StoreTime> {
        let stored = self.next()?;
        self.checked(read_time(stored))
    }

    pub(super) fn flag(&mut self) -> Read<bool> {
        self.next()
    }

    pub(super) fn text(&mut self) -> Read<&'r str> {
        self.next()
    }

    fn utf8(&mut self) -> Read<Option<&'r str>> {
        let bytes: Option<&[u8]> = self.next()?;
        bytes.map(|bytes| self.checked(std::str::from_utf8(bytes).ok())).transpose()
    }

    fn metadata(&mut self) -> Read<Arc<str>> {
        Ok(Arc::from(self.utf8()?.unwrap_or_default()))
    }

    pub(super) fn key(&mut self) -> Read<Acquisition> {
        let bytes = self.next()?;
        Ok(Acquisition { client: self.client(bytes)?, sequence: self.number()? })
    }

    fn inbox(&mut self) -> Read<Option<ClientId>> {
        let bytes: Option<&[u8]> = self.next()?;
        bytes.map(|bytes| self.client(bytes)).transpose()
    }

    fn client(&self, bytes: &[u8]) -> Read<ClientId> {
        self.checked(bytes.try_into().ok().map(u128::from_be_bytes).map(ClientId::new))
    }

    fn secret(&mut self) -> Read<GrantSecret> {
        let bytes: &[u8] = self.next()?;
        self.checked(bytes.try_into().ok().map(GrantSecret::new))
    }

    pub(super) fn token(&mut self) -> Read<Token> {
        let number = self.number()?;
        self.checked(Token::new(number))
    }

    pub(super) fn lease(&mut self) -> Read<Lease> {
        Ok(Lease {
            acquisition: self.key()?,
            inbox: self.inbox()?,
            owner: self.utf8()?.map(Owner::new),
            weight: self.count()?,
            token: self.token()?,
            granted_at: self.time()?,
            expires_at: self.time()?,
            claimed: self.flag()?,
            retained: self.flag()?,
            metadata: self.metadata()?,
        })
    }

    /// A queue entry, and whether its client polls.
    pub(super) fn waiter(&mut self) -> Read<(Waiter, bool)> {
        let waiter = Waiter {
            place: self.number()?,
            acquisition: self.key()?,
            inbox: self.inbox()?,
            owner: self.utf8()?.map(Owner::new),
            weight: self.count()?,
            ttl: Duration::from_micros(self.number()?),
            reserve: self.count()?,
            since: self.time()?,
            deadline: self.time()?,
            parked: self.flag()?,
            metadata: self.metadata()?,
            replaces: self.optional_number()?,
            secret: GrantSecret::UNUSED,
        };
        let polls = self.flag()?;
        Ok((Waiter { secret: self.secret()?, ..waiter }, polls))
    }

    /// A resource's row; `None` if all of its columns are null.
    pub(super) fn resource(&mut self) -> Read<Option<ResourceRow>> {
        if self.is_null() {
            return Ok(None);
        }
        let id = self.id()?;
        let header = Header {
            capacity: self.count()?,
            in_use: self.count()?,
            last_token: self.number()?,
            next_place: self.number()?,
            head: self.number()?,
            leases: self.count()?,
            waiters: self.count()?,
            parked: self.count()?,
            tombstones: self.count()?,
            next_expiry: self.time()?,
            remember_until: self.time()?,
        };
        let has_slot = !matches!(self.row.try_get::<_, Option<&[u8]>>(self.at), Ok(None));
        let slot = if has_slot { Some(self.lease()?) } else { None };
        Ok(Some(ResourceRow { id, header, slot }))
    }
}
