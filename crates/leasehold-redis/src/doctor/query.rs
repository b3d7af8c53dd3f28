//! Single questions to a server.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, FromRedisValue, RedisError};

pub(super) fn command(words: &[&str]) -> Cmd {
    let mut command = Cmd::new();
    command.arg(words);
    command
}

pub(super) async fn ask<T: FromRedisValue>(
    connection: &mut MultiplexedConnection,
    words: &[&str],
) -> Result<T, RedisError> {
    command(words).query_async(connection).await
}

/// The lines `name:value` of an answer.
pub(super) async fn info_by(
    connection: &mut MultiplexedConnection,
    words: &[&str],
) -> HashMap<String, String> {
    let text: String = ask(connection, words).await.unwrap_or_default();
    let pair = |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.to_owned()));
    text.lines().filter_map(pair).collect()
}

pub(super) fn median(spans: &mut [Duration]) -> Duration {
    spans.sort_unstable();
    spans.get(spans.len() / 2).copied().unwrap_or_default()
}
