//! One server that never fails, to which each process says what it does, in one order for all of them.

use std::path::{Path, PathBuf};

use leasehold::redis;
use leasehold_testkit::Server;

/// What has been said, in this order.
const EVENTS: &str = "events";

/// Set once the processes are to end.
const END: &str = "end";

pub(crate) struct Witness(Server);

impl Witness {
    pub(crate) fn start() -> Self {
        Self(Server::on_socket())
    }

    pub(crate) fn url(&self) -> String {
        self.0.socket_url()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.0.folder()
    }

    pub(crate) fn events(&self) -> Vec<String> {
        self.0.query(&["LRANGE", EVENTS, "0", "-1"]).expect("it never fails")
    }

    pub(crate) fn end(&self) {
        self.0.run(&["SET", END, "1"]);
    }
}

/// A process's way to it.
pub(crate) struct Report(redis::Connection);

impl Report {
    pub(crate) fn to(url: &str) -> Self {
        let client = redis::Client::open(url).expect("an address");
        Self(client.get_connection().expect("it never fails"))
    }

    /// Returns once it is known in which order it was said.
    pub(crate) fn say(&mut self, event: &str) {
        let _: i64 = redis::cmd("RPUSH").arg(EVENTS).arg(event).query(&mut self.0).expect("it never fails");
    }

    pub(crate) fn is_to_end(&mut self) -> bool {
        redis::cmd("EXISTS").arg(END).query(&mut self.0).expect("it never fails")
    }

    /// Where both sides can have a file.
    pub(crate) fn folder(&mut self) -> PathBuf {
        let dir: (String, String) =
            redis::cmd("CONFIG").arg("GET").arg("dir").query(&mut self.0).expect("it never fails");
        dir.1.into()
    }
}

/// How many critical sections there were in which the lease was held from beginning to end; or what is wrong with them.
///
/// A section with token 7 is `begin 7`, `end 7` and, said after the guard was looked at once more, `held 7`.
pub(crate) fn check(events: &[String]) -> Result<usize, String> {
    let mut sections: Vec<(usize, usize, u64)> = Vec::new();
    let place = |event: String| events.iter().position(|other| *other == event);
    for event in events {
        let Some(token) = event.strip_prefix("held ") else { continue };
        let [Some(begin), Some(end)] = ["begin", "end"].map(|word| place(format!("{word} {token}"))) else {
            return Err(format!("{token} neither begins nor ends"));
        };
        sections.push((begin, end, token.parse().map_err(|_| format!("{token} is no token"))?));
    }
    sections.sort_unstable();
    for pair in sections.windows(2) {
        let [(_, end, token), (begin, _, next)] = pair else { continue };
        if begin < end {
            return Err(format!("{token} and {next} held it at the same time: {events:?}"));
        }
        if token >= next {
            return Err(format!("{next} came after {token}: {events:?}"));
        }
    }
    Ok(sections.len())
}

/// A check that can't fail would prove nothing.
pub(crate) fn the_check_finds_what_is_wrong() {
    let said = |events: &str| check(&events.split(", ").map(str::to_owned).collect::<Vec<_>>());
    assert_eq!(said("begin 1, end 1, held 1, begin 2, begin 3, end 3, held 3"), Ok(2));
    assert_eq!(said("begin 1, end 1, begin 2, held 1, end 2, held 2"), Ok(2));
    assert!(said("begin 1, begin 2, end 1, held 1, end 2, held 2").is_err());
    assert!(said("begin 2, end 2, held 2, begin 1, end 1, held 1").is_err());
    assert!(said("begin 1, end 1, held 1, begin 1, end 1, held 1").is_err());
    assert!(said("begin 1, held 1").is_err());
}
