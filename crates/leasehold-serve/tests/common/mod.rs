//! A server in this process, and a client that checks each answer against the description of the API.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use leasehold::Client;
use leasehold_serve::{Config, Control, Limits, Listen, Server, Tokens};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) const WRITE: &str = "write-0123456789abcdef";
pub(crate) const READ: &str = "read-0123456789abcdef";

/// Limit of each wait, for a debug build on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

static DESCRIPTION: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../openapi.json")).expect("JSON"));

/// A server with a store of its own.
pub(crate) struct Place {
    folder: tempfile::TempDir,
    pub(crate) store: String,
    pub(crate) tcp: String,
    pub(crate) control: Control,
    stop: Option<oneshot::Sender<()>>,
    running: Option<JoinHandle<()>>,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) content_type: String,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// The code of a problem.
    pub(crate) fn code(&self) -> String {
        assert_eq!(self.content_type, "application/problem+json", "{self:?}");
        self.json()["code"].as_str().expect("a code").to_owned()
    }

    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", self.text);
        self
    }
}

impl Place {
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub(crate) async fn with(set: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let store = format!("sqlite:{}", folder.path().join("locks.db").display());
        leasehold_serve::install_recorder();
        let client = Client::connect(&store).await.expect("a store");
        Self::start(folder, store, client, set).await
    }

    /// A server with the locks of this client.
    pub(crate) async fn of(client: Client) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start(folder, String::new(), client, |_| {}).await
    }

    async fn start(
        folder: tempfile::TempDir,
        store: String,
        client: Client,
        set: impl FnOnce(&mut Config),
    ) -> Self {
        let mut config =
            Config::new([Listen::Unix(folder.path().join("socket")), Listen::Tcp("127.0.0.1:0".to_owned())]);
        config.tokens = Tokens::parse(&format!("ops write,force {WRITE}\nread {READ}")).expect("tokens");
        config.drain = Duration::from_millis(500);
        set(&mut config);
        let server = Server::bind(config, client).await.expect("it listens");
        let tcp = server.addresses().into_iter().find(|address| address.starts_with("http")).expect("TCP");
        let control = server.control();
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(server.run(async { drop(stopped.await) }));
        Self { folder, store, tcp, control, stop: Some(stop), running: Some(running) }
    }

    pub(crate) async fn with_limits(set: impl FnOnce(&mut Limits)) -> Self {
        Self::with(|config| set(&mut config.limits)).await
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn tcp_address(&self) -> &str {
        self.tcp.split_once("://").expect("a scheme").1
    }

    /// Another client of the same store.
    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.store).await.expect("a store")
    }

    /// Tells the server to stop.
    pub(crate) fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Tells the server to stop when it is dropped.
    pub(crate) fn stopper(&mut self) -> oneshot::Sender<()> {
        self.stop.take().expect("it is not told yet")
    }

    /// Waits for the end of the server.
    pub(crate) async fn ended(&mut self) {
        let running = self.running.take().expect("it runs");
        tokio::time::timeout(SOON, running).await.expect("it ends").expect("no panic");
    }

    /// Another server of the same store.
    pub(crate) async fn beside(&self) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start(folder, self.store.clone(), self.client().await, |_| {}).await
    }

    pub(crate) async fn unix(&self) -> UnixStream {
        UnixStream::connect(self.path("socket")).await.expect("it listens")
    }

    pub(crate) async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.tcp_address()).await.expect("it listens")
    }

    /// A request through the Unix socket, whose answer must be as described.
    pub(crate) async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        checked(method, path, send(self.unix().await, method, path, body, &[]).await)
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, Some(body)).await
    }

    /// A request over TCP with this token.
    pub(crate) async fn call_with(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> Answer {
        let header = token.map(|token| (AUTHORIZATION.as_str(), format!("Bearer {token}")));
        let headers: Vec<_> = header.iter().map(|(name, value)| (*name, value.as_str())).collect();
        checked(method, path, send(self.tcp().await, method, path, body, &headers).await)
    }

    pub(crate) async fn acquire(&self, name: &str, body: Value) -> Value {
        self.post(&format!("/v1/locks/mutex/{name}/acquire"), body).await.expect(200).json()
    }

    /// Renews or releases leases by their ids: the outcomes.
    pub(crate) async fn leases(&self, action: &str, ids: &[Value]) -> Vec<Value> {
        let path = format!("/v1/leases/{action}");
        let answer = self.post(&path, json!({ "leases": ids })).await.expect(200).json();
        answer["leases"].as_array().expect("outcomes").clone()
    }

    /// Renews the lease of this grant: the outcome.
    pub(crate) async fn renew(&self, grant: &Value) -> Value {
        self.leases("renew", std::slice::from_ref(&grant["lease"])).await.remove(0)
    }

    /// Releases the lease of this grant: the word for the outcome.
    pub(crate) async fn release(&self, grant: &Value) -> String {
        let outcome = self.leases("release", std::slice::from_ref(&grant["lease"])).await.remove(0);
        outcome["outcome"].as_str().expect("a word").to_owned()
    }

    pub(crate) async fn state(&self, name: &str) -> Value {
        self.get(&format!("/v1/locks/mutex/{name}")).await.expect(200).json()
    }

    pub(crate) async fn until_waiting(&self, name: &str, count: usize) {
        let mut state = Value::Null;
        let is_seen = is_so_within(SOON, async || {
            state = self.state(name).await;
            state["waiters"].as_array().expect("an array").len() == count
        });
        assert!(is_seen.await, "it has not {count} waiters: {state}");
    }

    pub(crate) async fn until_free(&self, name: &str) {
        let mut state = Value::Null;
        let is_seen = is_so_within(SOON, async || {
            state = self.state(name).await;
            state["holders"] == json!([])
        });
        assert!(is_seen.await, "it is still held: {state}");
    }

    pub(crate) async fn metric(&self, line: &str) -> Option<f64> {
        let text = self.get("/metrics").await.expect(200).text;
        let value = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
        value.map(|value| value.parse().expect("a number"))
    }
}

/// Sends one request over a connection of its own.
pub(crate) async fn send<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    method: &str,
    path: &str,
    body: Option<Value>,
    headers: &[(&str, &str)],
) -> Answer {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("a connection");
    let connection = tokio::spawn(connection);
    let mut request =
        Request::builder().method(Method::from_bytes(method.as_bytes()).expect("a method")).uri(path);
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case(HOST.as_str())) {
        request = request.header(HOST, "localhost");
    }
    if body.is_some() && !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case(CONTENT_TYPE.as_str())) {
        request = request.header(CONTENT_TYPE, "application/json");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let bytes = body.map_or_else(Bytes::new, |body| match body {
        // A text is sent as it is.
        Value::String(text) => text.into(),
        body => body.to_string().into(),
    });
    let response =
        sender.send_request(request.body(Full::new(bytes)).expect("a request")).await.expect("an answer");
    let (parts, body) = response.into_parts();
    let content_type = parts.headers.get(CONTENT_TYPE).map(|value| value.to_str().expect("text").to_owned());
    // A stream of events does not end.
    let text = tokio::time::timeout(SOON, body.collect()).await.expect("it ends").expect("a body").to_bytes();
    connection.abort();
    Answer {
        status: parts.status.as_u16(),
        content_type: content_type.unwrap_or_default(),
        headers: parts.headers,
        text: String::from_utf8(text.to_vec()).expect("UTF-8"),
    }
}

/// Reads until the text has arrived: everything that has. A stream of events does not end.
pub(crate) async fn read_until(stream: &mut (impl AsyncRead + Unpin), text: &str) -> String {
    let mut read = String::new();
    let all = async {
        while !read.contains(text) {
            let mut bytes = vec![0; 4096];
            let count = stream.read(&mut bytes).await.expect("it is read");
            assert!(count > 0, "the stream ended without {text:?}: {read}");
            read.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    };
    let is_there = tokio::time::timeout(SOON, all).await.is_ok();
    assert!(is_there, "{text:?} has not arrived: {read:.2000}");
    read
}

/// The described path that a request's path matches.
fn described(path: &str) -> Option<&'static Value> {
    let path = path.split('?').next().unwrap_or_default();
    let parts: Vec<&str> = path.split('/').collect();
    let matches = |template: &str| {
        let template: Vec<&str> = template.split('/').collect();
        template.len() == parts.len()
            && template.iter().zip(&parts).all(|(part, given)| part.starts_with('{') || part == given)
    };
    let paths = DESCRIPTION["paths"].as_object().expect("paths");
    paths.iter().find(|(template, _)| matches(template)).map(|(_, operations)| operations)
}

/// Checks that the answer has a status, a type and a body that the description of its operation has.
pub(crate) fn checked(method: &str, path: &str, answer: Answer) -> Answer {
    let operation = described(path).map(|operations| &operations[method.to_lowercase()]);
    let problem = json!({ "$ref": "#/components/schemas/Problem" });
    let schema = match operation.filter(|operation| !operation.is_null()) {
        Some(operation) => {
            let response = &operation["responses"][answer.status.to_string()];
            assert!(!response.is_null(), "{method} {path} does not describe {answer:?}");
            let Some(content) = response["content"].as_object() else {
                assert_eq!(answer.text, "", "{method} {path} has a body that is not described");
                return answer;
            };
            let media = answer.content_type.split(';').next().unwrap_or_default();
            let described = content.get(media).unwrap_or_else(|| panic!("{method} {path}: type {media}"));
            if [429, 503].contains(&answer.status) {
                assert!(answer.headers.contains_key(RETRY_AFTER), "{method} {path}: {answer:?}");
            }
            if answer.status >= 400 {
                let codes = response["description"].as_str().expect("text");
                let code = answer.code();
                assert!(
                    codes.split([' ', ',']).any(|known| known == code),
                    "{method} {path}: {code}: {codes}"
                );
            }
            described["schema"].clone()
        }
        None => problem,
    };
    if answer.content_type.contains("json") {
        let mut whole = schema;
        whole["components"] = DESCRIPTION["components"].clone();
        let body = answer.json();
        let validator = jsonschema::validator_for(&whole).expect("a schema");
        let errors: Vec<String> = validator.iter_errors(&body).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{method} {path}: {errors:?}: {body}");
    }
    answer
}

/// Waits until the condition holds, in bounded time.
pub(crate) async fn until(holds: impl AsyncFnMut() -> bool) {
    until_within(SOON, holds).await;
}

/// As [`until`], within a limit of its own.
pub(crate) async fn until_within(limit: Duration, holds: impl AsyncFnMut() -> bool) {
    assert!(is_so_within(limit, holds).await, "the condition does not hold after {limit:?}");
}

/// Whether the condition holds within the limit.
async fn is_so_within(limit: Duration, mut holds: impl AsyncFnMut() -> bool) -> bool {
    let give_up = Instant::now() + limit;
    while !holds().await {
        if Instant::now() > give_up {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    true
}
