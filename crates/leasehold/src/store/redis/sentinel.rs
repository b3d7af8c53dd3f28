//! Who is the master? Sentinels know, and tell when it changes.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::select_ok;
use leasehold_core::Failure;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionInfo, ProtocolVersion, PushInfo, PushKind, RedisError};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::address::Credentials;
use super::trouble::explain;
use super::{ANSWER_LIMIT, CONNECT_LIMIT};
use crate::store::StoreError;
use crate::url::Host;

/// How often the sentinels are asked, besides listening to them.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// Between two times that they are asked, however much they tell.
const AT_LEAST: Duration = Duration::from_millis(100);

const SWITCHED: &str = "+switch-master";

/// The sentinels of one service.
#[derive(Clone)]
pub(super) struct Sentinels {
    pub(super) hosts: Vec<ConnectionInfo>,
    pub(super) service: String,
    /// The servers', which are not the sentinels'.
    pub(super) credentials: Credentials,
}

impl Sentinels {
    /// The first master that a sentinel names and that agrees.
    pub(super) async fn find_master(&self) -> Result<(Host, ConnectionInfo), StoreError> {
        let found = select_ok(self.hosts.iter().map(|sentinel| self.verified(sentinel).boxed())).await;
        found.map(|(master, _)| master).map_err(|message| StoreError { failure: Failure::NotSent, message })
    }

    async fn verified(&self, sentinel: &ConnectionInfo) -> Result<(Host, ConnectionInfo), String> {
        let say = |what: String| format!("the sentinel {}: {what}", sentinel.addr());
        let mut connection = connect(sentinel, config()).await.map_err(|error| say(explain(&error)))?;
        let host = self.master_by(&mut connection).await.map_err(&say)?;
        let info = self.credentials.at(&host).map_err(|error| error.to_string())?;
        let say = |what: String| format!("the master {}: {what}", info.addr());
        let mut master = connect(&info, config()).await.map_err(|error| say(explain(&error)))?;
        let role: Result<Vec<redis::Value>, _> = redis::cmd("ROLE").query_async(&mut master).await;
        match role {
            Ok(role) if matches!(&role[..], [redis::Value::BulkString(word), ..] if word != b"master") => {
                Err(say("it says that it is none (any more)".to_owned()))
            }
            // Whoever may not ask will see by what the server refuses.
            Ok(_) => Ok((host, info)),
            Err(error) if error.code() == Some("NOPERM") => Ok((host, info)),
            Err(error) => Err(say(explain(&error))),
        }
    }

    async fn master_by(&self, sentinel: &mut MultiplexedConnection) -> Result<Host, String> {
        let mut ask = redis::cmd("SENTINEL");
        ask.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let answer = ask.query_async(sentinel).await;
        let answer: Option<(String, u16)> = answer.map_err(|error: RedisError| {
            if error.to_string().to_lowercase().contains("unknown command") {
                return "it is no sentinel: their port is 26379, unless set otherwise".to_owned();
            }
            explain(&error)
        })?;
        let (name, port) = answer.ok_or_else(|| format!("it knows no service {:?}", self.service))?;
        Ok(Host { name, port })
    }

    /// Returns when another than `master` is the master, which may be before that one knows it.
    pub(super) async fn until_switched(self, master: Host) {
        loop {
            let heard = Arc::new(Notify::new());
            let listening =
                select_ok(self.hosts.iter().map(|sentinel| self.listen(sentinel, heard.clone()).boxed()));
            if let Ok(((_connection, named), _)) = listening.await {
                if named != master {
                    return;
                }
                // Also when the connection is lost.
                let _ = timeout(ASK_AGAIN, heard.notified()).await;
                tokio::time::sleep(AT_LEAST).await;
            } else {
                tokio::time::sleep(ASK_AGAIN).await;
            }
        }
    }

    /// A connection that tells of changes, and who was the master after it began to.
    async fn listen(
        &self,
        sentinel: &ConnectionInfo,
        heard: Arc<Notify>,
    ) -> Result<(MultiplexedConnection, Host), String> {
        let ear = move |info: PushInfo| {
            if matches!(info.kind, PushKind::Message | PushKind::Disconnection) {
                heard.notify_one();
            }
            Ok::<(), std::convert::Infallible>(())
        };
        let connect = async {
            let mut connection = connect(sentinel, config().set_push_sender(ear)).await?;
            connection.subscribe(SWITCHED).await?;
            Ok::<_, RedisError>(connection)
        };
        let mut connection = connect.await.map_err(|error| explain(&error))?;
        let master = self.master_by(&mut connection).await?;
        Ok((connection, master))
    }
}

fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_LIMIT))
        .set_response_timeout(Some(ANSWER_LIMIT))
}

async fn connect(
    info: &ConnectionInfo,
    config: AsyncConnectionConfig,
) -> Result<MultiplexedConnection, RedisError> {
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let client = redis::Client::open(info.clone().set_redis_settings(settings))?;
    client.get_multiplexed_async_connection_with_config(&config).await
}
