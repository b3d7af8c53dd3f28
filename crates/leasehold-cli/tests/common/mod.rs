//! A store for one test, and the program that uses it.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::io::Read as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Limit of each wait, for a debug build on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// What the program says if it could not connect within the limit of `-n`.
pub(crate) const NO_CONNECTION: &str = "no connection within 1s";

/// A folder with a store in it.
pub(crate) struct Place {
    folder: tempfile::TempDir,
    /// Set if the store is not in the folder.
    url: Option<String>,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder"), url: None }
    }

    /// With a store elsewhere.
    pub(crate) fn on(url: &str) -> Self {
        Self { url: Some(url.to_owned()), ..Self::new() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn store(&self) -> String {
        self.url.clone().unwrap_or_else(|| format!("sqlite:{}", self.path("locks.db").display()))
    }

    /// The program with these arguments, without stdin, and with captured output.
    pub(crate) fn leasehold(&self, args: &[&str]) -> Command {
        let mut command = as_from_terminal(env!("CARGO_BIN_EXE_leasehold"));
        command.args(args).env("LEASEHOLD_STORE", self.store()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the program, again if a busy machine gave it no connection in the second that `-n` and a short `-w` allow.
    pub(crate) fn output(&self, args: &[&str]) -> Output {
        let deadline = Instant::now() + SOON;
        loop {
            let output = self.leasehold(args).output().expect("the program starts");
            let said = String::from_utf8_lossy(&output.stderr);
            if !said.contains(NO_CONNECTION) || Instant::now() > deadline {
                return output;
            }
        }
    }

    /// The exit code and stderr.
    pub(crate) fn code(&self, args: &[&str]) -> (i32, String) {
        let output = self.output(args);
        (code(output.status), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub(crate) fn start(&self, args: &[&str]) -> Started {
        Started(self.leasehold(args).spawn().expect("the program starts"))
    }

    pub(crate) fn show(&self, name: &str) -> Value {
        let output = self.output(&["show", name, "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    pub(crate) fn locks(&self) -> Value {
        let output = self.output(&["ls", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")["locks"].clone()
    }

    pub(crate) fn until_held(&self, name: &str) -> Value {
        until(|| {
            Some(self.show(name)).filter(|view| view["holders"].as_array().is_some_and(|all| !all.is_empty()))
        })
    }

    pub(crate) fn until_unused(&self) {
        until(|| self.locks().as_array()?.is_empty().then_some(()));
    }

    pub(crate) fn until_waiting(&self, name: &str, count: usize) {
        until(|| (self.show(name)["waiters"].as_array()?.len() == count).then_some(()));
    }
}

/// A program as a terminal starts it, with default signal handling. Ignored signals are inherited, and a background job or `nohup`
/// ignores signals that the tests send.
pub(crate) fn as_from_terminal(program: &str) -> Command {
    if cfg!(not(target_os = "linux")) {
        return Command::new(program);
    }
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT,QUIT,TERM").arg(program);
    command
}

/// A running program, killed if the test fails.
pub(crate) struct Started(pub(crate) Child);

impl Started {
    pub(crate) fn signal(&self, signal: &str) {
        send(signal, self.0.id());
    }

    /// Waits for the exit code, in bounded time.
    pub(crate) fn end(&mut self) -> i32 {
        until(|| self.0.try_wait().expect("it can be waited for").map(code))
    }

    pub(crate) fn stderr(&mut self) -> String {
        let mut text = String::new();
        self.0.stderr.take().expect("caught").read_to_string(&mut text).expect("text");
        text
    }

    /// The first line that it prints. If it ends without one, its exit code and its errors, so that a failed test shows them.
    pub(crate) fn line(&mut self) -> String {
        let stdout = self.0.stdout.as_mut().expect("caught");
        let mut line = Vec::new();
        let mut byte = [0];
        while stdout.read(&mut byte).expect("it prints") == 1 {
            if byte[0] == b'\n' {
                return String::from_utf8(line).expect("text");
            }
            line.push(byte[0]);
        }
        format!("ended with {}: {}{}", self.end(), String::from_utf8_lossy(&line), self.stderr())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn send(signal: &str, pid: u32) {
    let sent =
        Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().expect("kill runs");
    assert!(sent.success());
}

pub(crate) fn is_alive(pid: u32) -> bool {
    // A zombie is dead.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// Waits until `look` returns a value, in bounded time.
pub(crate) fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < give_up, "the condition does not hold after {SOON:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| -status.signal().unwrap_or(0))
}
