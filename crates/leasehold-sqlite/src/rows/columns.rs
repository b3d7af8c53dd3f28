//! How rows and their values are stored.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{Lease, Waiter};
use leasehold_core::{Acquisition, ClientId, GrantSecret, MAX_TOKEN, Owner, StoreTime, Token};
use leasehold_store::sql::{read_number, read_time, stored_key, stored_number, stored_time};
use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, Value, ValueRef};
use rusqlite::{Result, Row};

pub(super) fn read_lease(row: &Row<'_>) -> Result<Lease> {
    Ok(Lease {
        acquisition: read_key(row, 0)?,
        inbox: row.get::<_, Option<[u8; 16]>>(10)?.map(client),
        owner: row.get_ref(2)?.as_str_or_null()?.map(Owner::new),
        weight: row.get(3)?,
        token: Token::new(row.get::<_, Number>(4)?.0).ok_or(FromSqlError::OutOfRange(0))?,
        granted_at: row.get::<_, Time>(5)?.0,
        expires_at: row.get::<_, Time>(6)?.0,
        claimed: row.get(7)?,
        retained: row.get(8)?,
        metadata: Arc::from(row.get_ref(9)?.as_str()?),
    })
}

pub(super) fn read_waiter(row: &Row<'_>) -> Result<Waiter> {
    let (acquisition, inbox) = (read_key(row, 1)?, client(row.get(13)?));
    Ok(Waiter {
        place: row.get::<_, Number>(0)?.0,
        acquisition,
        inbox: (inbox != acquisition.client).then_some(inbox),
        owner: row.get_ref(3)?.as_str_or_null()?.map(Owner::new),
        weight: row.get(4)?,
        ttl: Duration::from_micros(row.get::<_, Number>(5)?.0),
        reserve: row.get(6)?,
        since: row.get::<_, Time>(7)?.0,
        deadline: row.get::<_, Time>(8)?.0,
        parked: row.get(9)?,
        metadata: Arc::from(row.get_ref(10)?.as_str()?),
        replaces: row.get::<_, Option<Number>>(11)?.map(|sequence| sequence.0),
        secret: GrantSecret::new(row.get(12)?),
    })
}

/// How an acquisition is stored.
pub(super) fn key(acquisition: Acquisition) -> ([u8; 16], i64) {
    stored_key(acquisition)
}

pub(super) fn read_key(row: &Row<'_>, at: usize) -> Result<Acquisition> {
    Ok(Acquisition { client: client(row.get(at)?), sequence: row.get::<_, Number>(at + 1)?.0 })
}

fn client(stored: [u8; 16]) -> ClientId {
    ClientId::new(u128::from_be_bytes(stored))
}

/// A number below 2^63.
pub(super) struct Number(pub(super) u64);

impl ToSql for Number {
    fn to_sql(&self) -> Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Owned(Value::Integer(stored_number(self.0))))
    }
}

impl FromSql for Number {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let number = value.as_i64()?;
        read_number(number).map(Self).ok_or(FromSqlError::OutOfRange(number))
    }
}

/// The last token of a lock. One that leaves no room for the next was not written by leasehold.
pub(super) struct LastToken(pub(super) u64);

impl FromSql for LastToken {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let Number(token) = Number::column_result(value)?;
        let is_possible = token <= MAX_TOKEN - 2 * u64::from(u32::MAX);
        is_possible.then_some(Self(token)).ok_or(FromSqlError::OutOfRange(stored_number(token)))
    }
}

/// A time.
pub(super) struct Time(pub(super) StoreTime);

impl ToSql for Time {
    fn to_sql(&self) -> Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Owned(Value::Integer(stored_time(self.0))))
    }
}

impl FromSql for Time {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let number = value.as_i64()?;
        read_time(number).map(Self).ok_or(FromSqlError::OutOfRange(number))
    }
}
