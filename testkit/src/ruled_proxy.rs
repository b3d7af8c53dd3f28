//! A proxy with the rules of a managed server: what it refuses, and how.
//!
//! It stands in front of a cluster of one node, which refuses keys of several hash slots in one command by itself. It changes requests only: a
//! request that is refused becomes a script that returns the error, so that the replies keep their order.

use std::collections::HashMap;
use std::io::{self, Read, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use sha1_smol::Sha1;

use crate::builder::Builder;
use crate::cluster::Cluster;
use crate::port::Port;
use crate::script_rules::SCRIPT_RULES;
use crate::server::Server;

/// What a managed server does not allow. By default it allows everything.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Scripts with a command that is not literal, or with a key that is not `KEYS[i]`, are refused, and so are those without a key.
    ///
    /// Source: help.aliyun.com, *Lua scripting in Tair*, limits of cluster instances, with the texts of the errors.
    pub literal_scripts: bool,
    /// Scripts may not use `TIME`, `PUBLISH`, `PUBSUB`, nor keys that are not declared, and need a key.
    ///
    /// Source: github.com/cristipufu/aspnetcore-redis-rate-limiting/issues/154 (TIME), github.com/Effect-TS/effect-smol/issues/2328 (keys).
    pub restricted_scripts: bool,
    /// Commands that are unknown.
    pub unknown: &'static [&'static str],
    /// No script is allowed.
    pub no_scripts: bool,
    /// It looks like one server: INFO says so.
    pub hides_cluster: bool,
    /// Each connection sees another run id.
    pub other_run_ids: bool,
    /// Messages do not arrive.
    pub loses_messages: bool,
    /// `PUBSUB NUMSUB` is answered by another server, which has no subscribers.
    pub counts_no_subscribers: bool,
    /// Scripts are forgotten at once, as where each call may reach another server.
    ///
    /// Source: github.com/Effect-TS/effect-smol/issues/2328.
    pub forgets_scripts: bool,
    /// Connections are closed after this time.
    pub lifetime: Option<Duration>,
}

impl Rules {
    /// Amazon ElastiCache Serverless: one address that speaks for a cluster.
    ///
    /// Source of the commands: docs.aws.amazon.com, *Supported and restricted commands*.
    #[must_use]
    pub fn serverless() -> Self {
        Self {
            restricted_scripts: true,
            unknown: &[
                "WAIT",
                "WAITAOF",
                "CONFIG",
                "DEBUG",
                "CLIENT|TRACKING",
                "CLIENT|CACHING",
                "CLIENT|KILL",
                "SLOWLOG",
                "MONITOR",
            ],
            ..Self::default()
        }
    }

    /// A cluster behind a proxy that looks like one server, as Alibaba Cloud and Tencent Cloud offer it.
    ///
    /// Source: help.aliyun.com, *Lua scripting in Tair* and *Limits on commands supported by cluster instances and proxies*.
    #[must_use]
    pub fn cluster_proxy() -> Self {
        Self {
            literal_scripts: true,
            restricted_scripts: true,
            hides_cluster: true,
            unknown: &[
                "HELLO",
                "ACL",
                "CLUSTER",
                "WAIT",
                "CONFIG",
                "CLIENT|TRACKING",
                "CLIENT|NO-EVICT",
                "ASKING",
                "SSUBSCRIBE",
                "SPUBLISH",
            ],
            ..Self::default()
        }
    }
}

/// The two profiles, and each of them with what is not known of it in its other position.
#[must_use]
pub fn positions() -> Vec<(String, Rules)> {
    let profiles = [("serverless", Rules::serverless()), ("cluster proxy", Rules::cluster_proxy())];
    let of = |(profile, rules): (&str, Rules)| {
        let rules = || rules.clone();
        [
            ("", rules()),
            (", other run ids", Rules { other_run_ids: true, ..rules() }),
            (", no subscribers", Rules { counts_no_subscribers: true, ..rules() }),
            (", no messages", Rules { loses_messages: true, ..rules() }),
            (", forgotten scripts", Rules { forgets_scripts: true, ..rules() }),
            // No multiple of it is a time at which a test calls.
            (", short lives", Rules { lifetime: Some(Duration::from_millis(2_300)), ..rules() }),
        ]
        .map(|(switch, rules)| (format!("{profile}{switch}"), rules))
    };
    profiles.into_iter().flat_map(of).collect()
}

/// A server behind a proxy with such rules.
pub struct RuledProxy {
    server: Cluster,
    port: Port,
    shared: Arc<Shared>,
}

struct Shared {
    rules: Rules,
    /// The hash of each script that was seen, and that of what runs instead.
    scripts: Mutex<HashMap<String, String>>,
    /// Each text that was seen, and what runs instead, or why nothing does.
    texts: Mutex<HashMap<String, Result<Vec<u8>, &'static str>>>,
    refused: AtomicUsize,
    /// Connections that were closed because of their age.
    expired: AtomicUsize,
    scripts_refused: Mutex<Vec<String>>,
    connections: Mutex<Vec<TcpStream>>,
    loses_messages: AtomicBool,
    /// What every script call answers.
    script_error: Mutex<Option<String>>,
    has_ended: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RuledProxy {
    /// Starts a server and a proxy before it.
    #[must_use]
    pub fn start(rules: Rules) -> Self {
        Self::before(&Server::builder(), rules)
    }

    /// The same with a server of these options.
    #[must_use]
    pub fn before(server: &Builder, rules: Rules) -> Self {
        let port = Port::claim();
        // The node has the proxy's address for clients.
        let server = server.clone().setting("cluster-announce-port", &port.number().to_string());
        let server = Cluster::with_masters(&server, 1, false);
        let target = server.nodes[0].port();
        let shared = Arc::new(Shared {
            scripts: Mutex::default(),
            refused: AtomicUsize::new(0),
            expired: AtomicUsize::new(0),
            texts: Mutex::default(),
            scripts_refused: Mutex::default(),
            connections: Mutex::default(),
            loses_messages: AtomicBool::new(rules.loses_messages),
            script_error: Mutex::default(),
            rules,
            has_ended: AtomicBool::new(false),
        });
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, port.number())).expect("a claimed port is free");
        let accepting = shared.clone();
        thread::spawn(move || {
            for (number, client) in listener.incoming().enumerate() {
                if accepting.has_ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(client) = client else { continue };
                let _ = serve(&accepting, number, client, target);
            }
        });
        Self { server, port, shared }
    }

    /// The address for clients.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port.number())
    }

    /// The server behind it.
    #[must_use]
    pub fn server(&self) -> &Server {
        &self.server.nodes[0]
    }

    /// The errors of all scripts that the rules have refused so far.
    #[must_use]
    pub fn scripts_refused(&self) -> Vec<String> {
        lock(&self.shared.scripts_refused).clone()
    }

    /// How many commands the rules have refused so far.
    #[must_use]
    pub fn refused(&self) -> usize {
        self.shared.refused.load(Ordering::SeqCst)
    }

    /// Whether messages that are published from now on get lost.
    pub fn lose_messages(&self, lose: bool) {
        self.shared.loses_messages.store(lose, Ordering::SeqCst);
    }

    /// Lets every script call end with this error from now on.
    pub fn fail_scripts(&self, error: Option<&str>) {
        *lock(&self.shared.script_error) = error.map(str::to_owned);
    }

    /// How many connections were closed because of their age.
    #[must_use]
    pub fn connections_expired(&self) -> usize {
        self.shared.expired.load(Ordering::SeqCst)
    }

    /// Closes all connections.
    pub fn cut(&self) {
        for connection in lock(&self.shared.connections).drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for RuledProxy {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        self.cut();
        // The acceptor waits for a connection.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port.number()));
    }
}

/// Serves a connection: a thread for the requests, which are changed, and one for the replies, which are not.
fn serve(shared: &Arc<Shared>, number: usize, client: TcpStream, target: u16) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, target))?;
    for connection in [&client, &server] {
        connection.set_nodelay(true)?;
        lock(&shared.connections).push(connection.try_clone()?);
    }
    let (mut replies, mut to_client) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || {
        let _ = io::copy(&mut replies, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    if let Some(lifetime) = shared.rules.lifetime {
        let (ending, expiring) = (client.try_clone()?, shared.clone());
        thread::spawn(move || {
            thread::sleep(lifetime);
            if ending.shutdown(Shutdown::Both).is_ok() {
                expiring.expired.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    let shared = shared.clone();
    thread::spawn(move || {
        let mut requests = Requests { stream: client, bytes: Vec::new(), at: 0 };
        let mut server = server;
        while let Ok(Some(request)) = requests.next() {
            let request = shared.changed(number, request);
            if server.write_all(&encoded(&request)).is_err() {
                break;
            }
        }
        let _ = server.shutdown(Shutdown::Both);
    });
    Ok(())
}

/// The words of a request.
type Request = Vec<Vec<u8>>;

fn words(words: &[&str]) -> Request {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// The request with another channel in the word at this position.
fn elsewhere(mut request: Request, at: usize) -> Request {
    if let Some(channel) = request.get_mut(at) {
        channel.splice(0..0, *b"nowhere:");
    }
    request
}

fn encoded(request: &Request) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", request.len()).into_bytes();
    for word in request {
        bytes.extend(format!("${}\r\n", word.len()).into_bytes());
        bytes.extend(word);
        bytes.extend(b"\r\n");
    }
    bytes
}

/// Reads requests from a connection.
struct Requests {
    stream: TcpStream,
    bytes: Vec<u8>,
    at: usize,
}

impl Requests {
    fn next(&mut self) -> io::Result<Option<Request>> {
        let Some(count) = self.number(b'*')? else { return Ok(None) };
        let mut request = Vec::with_capacity(count);
        for _ in 0..count {
            let Some(length) = self.number(b'$')? else { return Ok(None) };
            while self.bytes.len() < self.at + length + 2 {
                if !self.read_more()? {
                    return Ok(None);
                }
            }
            request.push(self.bytes[self.at..self.at + length].to_vec());
            self.at += length + 2;
        }
        self.bytes.drain(..self.at);
        self.at = 0;
        Ok(Some(request))
    }

    /// A line of this kind with a number.
    fn number(&mut self, kind: u8) -> io::Result<Option<usize>> {
        loop {
            if let Some(length) = self.bytes[self.at..].windows(2).position(|pair| pair == b"\r\n") {
                let line = &self.bytes[self.at..self.at + length];
                let number = line
                    .strip_prefix(&[kind])
                    .and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
                self.at += length + 2;
                return number.map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into());
            }
            if !self.read_more()? {
                return Ok(None);
            }
        }
    }

    fn read_more(&mut self) -> io::Result<bool> {
        let mut piece = [0; 16 * 1024];
        let read = self.stream.read(&mut piece)?;
        self.bytes.extend_from_slice(&piece[..read]);
        Ok(read > 0)
    }
}

impl Shared {
    /// The request that the server gets instead.
    fn changed(&self, connection: usize, request: Request) -> Request {
        let word = |at: usize| {
            request.get(at).map(|word| String::from_utf8_lossy(word).to_uppercase()).unwrap_or_default()
        };
        let (name, second, rules) = (word(0), word(1), &self.rules);
        if rules.unknown.contains(&&*name) || rules.unknown.contains(&&*format!("{name}|{second}")) {
            return self.refusal(&format!("ERR unknown command '{name}'"));
        }
        match &*name {
            "EVAL" | "EVALSHA" => self.script(&name, request),
            "SCRIPT" if rules.no_scripts => self.refusal("ERR unknown command 'SCRIPT'"),
            "INFO" if rules.hides_cluster || rules.other_run_ids => {
                let section = request.get(1).cloned().unwrap_or_else(|| b"default".to_vec());
                let shown = "local info = redis.call('INFO', ARGV[1])
                    if ARGV[2] ~= '' then info = string.gsub(info, '(run_id:)%x+', '%1' .. ARGV[2]) end
                    if ARGV[3] ~= '' then info = string.gsub(info, '_mode:cluster', '_mode:standalone') end
                    return info";
                let run_id = if rules.other_run_ids { format!("{connection:040x}") } else { String::new() };
                let hides = if rules.hides_cluster { "1" } else { "" };
                let mut script = words(&["EVAL", shown, "0"]);
                script.extend([section, run_id.into_bytes(), hides.as_bytes().to_vec()]);
                script
            }
            "PUBLISH" if self.loses_messages.load(Ordering::SeqCst) => elsewhere(request, 1),
            "PUBSUB" if rules.counts_no_subscribers => elsewhere(request, 2),
            _ => request,
        }
    }

    fn refusal(&self, error: &str) -> Request {
        self.refused.fetch_add(1, Ordering::SeqCst);
        words(&["EVAL", "return redis.error_reply(ARGV[1])", "0", error])
    }

    fn refused_script(&self, error: &str) -> Request {
        lock(&self.scripts_refused).push(error.to_owned());
        self.refusal(error)
    }

    /// A script call under the rules.
    fn script(&self, name: &str, mut request: Request) -> Request {
        let rules = &self.rules;
        if let Some(error) = &*lock(&self.script_error) {
            return self.refusal(error);
        }
        if rules.no_scripts {
            return self.refused_script(&format!("ERR unknown command '{name}'"));
        }
        let has_keys = request.get(2).is_some_and(|count| count != b"0");
        if (rules.literal_scripts || rules.restricted_scripts) && !has_keys {
            return self.refused_script(
                "ERR for redis cluster, eval/evalsha number of keys can't be negative or zero",
            );
        }
        let Some(script) = request.get(1).map(|script| String::from_utf8_lossy(script).into_owned()) else {
            return request;
        };
        if name == "EVALSHA" {
            if rules.forgets_scripts {
                request[1] = b"0".to_vec();
            } else if let Some(instead) = lock(&self.scripts).get(&script.to_lowercase()) {
                request[1] = instead.clone().into_bytes();
            }
            return request;
        }
        let ruled = lock(&self.texts).entry(script).or_insert_with_key(|script| self.ruled(script)).clone();
        match ruled {
            Ok(text) => request[1] = text,
            Err(error) => return self.refused_script(error),
        }
        request
    }

    /// The text that runs instead, or why none does.
    fn ruled(&self, script: &str) -> Result<Vec<u8>, &'static str> {
        if self.rules.literal_scripts
            && let Some(error) = literal_violation(script)
        {
            return Err(error);
        }
        if !self.rules.restricted_scripts {
            return Ok(script.as_bytes().to_vec());
        }
        let ruled = format!("{SCRIPT_RULES}{script}");
        let hash = |text: &str| Sha1::from(text).digest().to_string();
        lock(&self.scripts).insert(hash(script), hash(&ruled));
        Ok(ruled.into_bytes())
    }
}

/// What a check of the text refuses, if it refuses something.
#[must_use]
fn literal_violation(script: &str) -> Option<&'static str> {
    const NOT_LITERAL: &str = "ERR bad lua script for redis cluster, first parameter of redis.call/redis.pcall must be a single literal string";
    const NOT_DECLARED: &str = "ERR bad lua script for redis cluster, all the keys that the script uses should be passed using the KEYS array, and KEYS should not be in expression";
    let code: Vec<&str> = script.lines().map(|line| line.split("--").next().unwrap_or_default()).collect();
    let code = code.join("\n");
    for word in ["redis.call", "redis.pcall"] {
        for (at, _) in code.match_indices(word) {
            let Some(called) = code[at + word.len()..].strip_prefix("('") else { return Some(NOT_LITERAL) };
            let Some((_, rest)) = called.split_once('\'') else { return Some(NOT_LITERAL) };
            let key = rest.trim_start_matches([',', ' ']);
            let is_declared = key.strip_prefix("KEYS[").and_then(|key| key.split_once(']')).is_some_and(
                |(number, rest)| {
                    number.bytes().all(|digit| digit.is_ascii_digit())
                        && rest.trim_start().starts_with([',', ')'])
                },
            );
            if !is_declared {
                return Some(NOT_DECLARED);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(proxy: &RuledProxy, request: &[&str]) -> Result<redis::Value, String> {
        let client = redis::Client::open(proxy.url()).unwrap();
        let mut connection = client.get_connection().unwrap();
        let mut command = redis::Cmd::new();
        request.iter().for_each(|word| {
            command.arg(word);
        });
        command.query(&mut connection).map_err(|error: redis::RedisError| error.to_string())
    }

    #[test]
    fn rules_are_those_of_the_profiles() {
        for rules in [Rules::serverless(), Rules::cluster_proxy()] {
            let hides_cluster = rules.hides_cluster;
            let proxy = RuledProxy::start(rules);
            let refused = |request: &[&str]| ask(&proxy, request).err().unwrap_or_default();
            let script = |text: &str| refused(&["EVAL", text, "2", "a{1}", "b{1}"]);
            assert_eq!(script("return redis.call('SET', KEYS[2], 'x')"), "");
            assert!(refused(&["EVAL", "return 1", "0"]).contains("number of keys"));
            assert_ne!(script("return redis.call('TIME')"), "");
            assert_ne!(script("return redis.call('GET', 'c{1}')"), "");
            assert_ne!(refused(&["EVAL", "return 1", "2", "a", "b"]), "", "two hash slots");
            assert!(refused(&["WAIT", "0", "0"]).contains("unknown command"));
            assert_eq!(refused(&["CLUSTER", "SLOTS"]).contains("unknown command"), hides_cluster);
            assert!(proxy.refused() >= 2 && !proxy.scripts_refused().is_empty());
        }
    }

    #[test]
    fn check_of_the_text_knows_what_is_literal() {
        for (script, is_refused) in [
            ("return redis.call('GET', KEYS[1])", false),
            ("return redis.pcall('HSET', KEYS[2], unpack(ARGV)) -- redis.call(x)", false),
            ("local call = redis.call", true),
            ("return redis.call(ARGV[1], KEYS[1])", true),
            ("return redis.call('GET', key)", true),
            ("return redis.call('GET', KEYS[1] .. 'x')", true),
            ("return redis.call('TIME')", true),
        ] {
            assert_eq!(literal_violation(script).is_some(), is_refused, "{script}");
        }
    }
}
