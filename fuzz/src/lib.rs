//! What the fuzz targets share: reply values from random bytes.

#![forbid(unsafe_code)]

use arbitrary::{Arbitrary, Result, Unstructured};
use redis::Value;

/// A reply value of limited depth.
#[derive(Clone, Debug)]
pub struct AnyValue(pub Value);

impl<'a> Arbitrary<'a> for AnyValue {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        value(input, 4).map(Self)
    }
}

fn value(input: &mut Unstructured<'_>, depth: u32) -> Result<Value> {
    Ok(match input.int_in_range(0..=if depth == 0 { 6 } else { 8 })? {
        0 => Value::Nil,
        1 => Value::Int(input.arbitrary()?),
        // Most numbers that scripts return are small or a time.
        2 => Value::Int(input.int_in_range(-1..=16)?),
        3 => Value::Int(1_700_000_000_000_000 + i64::from(input.arbitrary::<u32>()?)),
        4 => {
            let length = input.int_in_range(0..=80)?;
            Value::BulkString(input.bytes(length.min(input.len()))?.to_vec())
        }
        5 => Value::BulkString(format!("{}-{}", input.arbitrary::<u64>()?, input.arbitrary::<u16>()?).into()),
        6 => Value::Okay,
        _ => {
            let length = input.int_in_range(0..=9)?;
            Value::Array((0..length).map(|_| value(input, depth - 1)).collect::<Result<_>>()?)
        }
    })
}
