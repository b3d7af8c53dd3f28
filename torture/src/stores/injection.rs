//! What an injection needs to know, and what several kinds of servers share.

use std::thread::sleep;
use std::time::Duration;

use leasehold_testkit::{Proxy, Server};
use redis::RedisResult;

use crate::faults::Fault;
use crate::rng::Rng;

/// What a fault was done to, or why it could not be injected.
pub(crate) type Done = Result<String, String>;

/// What an injection needs to know.
pub(crate) struct Injection<'a> {
    pub(crate) fault: Fault,
    pub(crate) ttl: Duration,
    pub(crate) rng: &'a mut Rng,
}

impl Injection<'_> {
    /// A random time between these parts of the ttl, in percent.
    pub(crate) fn duration(&mut self, low: u64, high: u64) -> Duration {
        let ttl = u64::try_from(self.ttl.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(ttl * self.rng.between(low, high) / 100)
    }
}

/// Closes all connections of clients, also those that receive pushes.
pub(super) fn kill_clients(server: &Server) -> Result<(), String> {
    for kind in ["normal", "pubsub"] {
        command(server, &["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"])?;
    }
    Ok(())
}

/// Kills all clients up to four times, and waits after each time. It has failed if not even one time has succeeded.
pub(super) fn kill_repeatedly(injection: &mut Injection<'_>, kill: impl Fn() -> Result<(), String>) -> Done {
    let times = injection.rng.between(1, 4);
    let mut done = Err(String::new());
    for _ in 0..times {
        done = done.or(kill());
        sleep(injection.duration(1, 10));
    }
    done.map(|()| format!("{times} times"))
}

/// Sends a command whose answer says nothing.
pub(super) fn command(server: &Server, words: &[&str]) -> Result<(), String> {
    let done: RedisResult<redis::Value> = server.query(words);
    done.map(|_| ()).map_err(|error| error.to_string())
}

/// Injects a fault of the network in front of one server.
pub(super) fn disturb_network(proxy: &Proxy, injection: &mut Injection<'_>) -> String {
    let time = injection.duration(5, 150);
    let ways = injection.rng.between(1, 3);
    let (requests, replies) = (ways & 1 > 0, ways & 2 > 0);
    let mut what = format!("for {} ms", time.as_millis());
    match injection.fault {
        Fault::NetDelay => {
            let delay = Duration::from_millis(injection.rng.between(5, 60));
            proxy.delay_requests(if requests { delay } else { Duration::ZERO });
            proxy.delay_replies(if replies { delay } else { Duration::ZERO });
            what = format!("{} ms {what}", delay.as_millis());
            sleep(time);
            proxy.delay_requests(Duration::ZERO);
            proxy.delay_replies(Duration::ZERO);
        }
        Fault::NetCut => {
            proxy.refuse(true);
            proxy.cut();
            sleep(time);
            proxy.refuse(false);
        }
        Fault::NetBlackHole => {
            proxy.drop_requests(requests);
            proxy.drop_replies(replies);
            sleep(time);
            proxy.drop_requests(false);
            proxy.drop_replies(false);
            proxy.cut();
        }
        other => unreachable!("{other:?} is no fault of an independent server"),
    }
    if injection.fault == Fault::NetCut {
        return what;
    }
    format!("{what}, {}", ["", "requests", "replies", "both ways"][usize::try_from(ways).unwrap_or(0)])
}
