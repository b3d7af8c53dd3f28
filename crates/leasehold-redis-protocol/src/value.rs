//! Reply values of any client library.

/// A reply value of a client library, as the decoders read it.
///
/// The crate implements it for its own [`Value`], and with the feature `redis` for that of the `redis` crate. To decode
/// the values of another client library without a copy, implement this trait for its value type.
pub trait ReplyValue: Sized {
    /// A view of this value.
    fn view(&self) -> ValueRef<'_, Self>;
}

/// A borrowed view of a reply value of type `V`.
#[derive(Debug)]
pub enum ValueRef<'a, V> {
    /// A null reply, or `false` of a script.
    Nil,
    /// An integer.
    Int(i64),
    /// A bulk string.
    Bytes(&'a [u8]),
    /// A list.
    List(&'a [V]),
    /// A value that no script of this protocol returns.
    Other,
}

/// An owned reply value, for programs whose client library has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A null reply, or `false` of a script.
    Nil,
    /// An integer.
    Int(i64),
    /// A bulk string.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Self>),
}

impl ReplyValue for Value {
    fn view(&self) -> ValueRef<'_, Self> {
        match self {
            Self::Nil => ValueRef::Nil,
            Self::Int(number) => ValueRef::Int(*number),
            Self::Bytes(bytes) => ValueRef::Bytes(bytes),
            Self::List(values) => ValueRef::List(values),
        }
    }
}

#[cfg(feature = "redis")]
impl ReplyValue for redis::Value {
    fn view(&self) -> ValueRef<'_, Self> {
        match self {
            Self::Nil => ValueRef::Nil,
            Self::Int(number) => ValueRef::Int(*number),
            Self::BulkString(bytes) => ValueRef::Bytes(bytes),
            Self::Array(values) => ValueRef::List(values),
            _ => ValueRef::Other,
        }
    }
}

#[cfg(all(test, feature = "redis"))]
mod tests {
    use redis::Value::{Array, BulkString, Int, Nil, Okay, SimpleString};

    use super::*;

    #[test]
    fn values_of_the_redis_crate_are_read_as_they_are() {
        assert!(matches!(Nil.view(), ValueRef::Nil));
        assert!(matches!(Int(-5).view(), ValueRef::Int(-5)));
        assert!(matches!(BulkString(b"a".to_vec()).view(), ValueRef::Bytes(b"a")));
        assert!(matches!(Array(vec![Nil, Int(5)]).view(), ValueRef::List([Nil, Int(5)])));
        for other in [Okay, SimpleString("a".to_owned())] {
            assert!(matches!(other.view(), ValueRef::Other), "{other:?}");
        }
    }
}
