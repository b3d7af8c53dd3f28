//! How rows and their values are stored.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::model::{Lease, Waiter};
use leasehold_core::{Acquisition, ClientId, Owner, StoreTime, Token};
use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, Value, ValueRef};
use rusqlite::{Result, Row};

pub(super) fn read_lease(row: &Row<'_>) -> Result<Lease> {
    Ok(Lease {
        acquisition: read_key(row, 0)?,
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
    Ok(Waiter {
        place: row.get::<_, Number>(0)?.0,
        acquisition: read_key(row, 1)?,
        owner: row.get_ref(3)?.as_str_or_null()?.map(Owner::new),
        weight: row.get(4)?,
        ttl: Duration::from_micros(row.get::<_, Number>(5)?.0),
        reserve: row.get(6)?,
        since: row.get::<_, Time>(7)?.0,
        deadline: row.get::<_, Time>(8)?.0,
        parked: row.get(9)?,
        metadata: Arc::from(row.get_ref(10)?.as_str()?),
        replaces: row.get::<_, Option<Number>>(11)?.map(|sequence| sequence.0),
    })
}

/// How an acquisition is stored: bytes that sort as the number does.
pub(super) fn key(acquisition: Acquisition) -> ([u8; 16], Number) {
    (acquisition.client.get().to_be_bytes(), Number(acquisition.sequence))
}

pub(super) fn read_key(row: &Row<'_>, at: usize) -> Result<Acquisition> {
    let client = ClientId::new(u128::from_be_bytes(row.get(at)?));
    Ok(Acquisition { client, sequence: row.get::<_, Number>(at + 1)?.0 })
}

/// A number below 2^63, which is what SQLite can store.
pub(super) struct Number(pub(super) u64);

impl ToSql for Number {
    fn to_sql(&self) -> Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Owned(Value::Integer(i64::try_from(self.0).unwrap_or(i64::MAX))))
    }
}

impl FromSql for Number {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let number = value.as_i64()?;
        u64::try_from(number).map(Self).map_err(|_| FromSqlError::OutOfRange(number))
    }
}

/// A time, whose *never* is the largest number there.
pub(super) struct Time(pub(super) StoreTime);

impl ToSql for Time {
    fn to_sql(&self) -> Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Owned(Value::Integer(i64::try_from(self.0.as_micros()).unwrap_or(i64::MAX))))
    }
}

impl FromSql for Time {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        match value.as_i64()? {
            i64::MAX => Ok(Self(StoreTime::NEVER)),
            _ => Number::column_result(value).map(|number| Self(StoreTime::from_micros(number.0))),
        }
    }
}
