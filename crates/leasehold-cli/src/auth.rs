//! `--auth-command`: a program that prints the credentials of a server.
//!
//! It is an option, and no part of an address: an address that comes from elsewhere must not start programs. No shell is in between. What
//! the program prints is in no message; what it writes to stderr is shown on a terminal only, because a log keeps what it gets.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal as _, Read as _};
use std::process::{self, ChildStdout, ExitStatus, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use leasehold::{CredentialRequest, Credentials};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use serde_json::{Map, Value};

use crate::child::die_with_parent;
use crate::exit::Stop;
use crate::orphans::Own;

/// Max time for the program. A little less than the library waits for, so that it has been killed before leasehold ends.
pub(crate) const LIMIT: Duration = Duration::from_millis(9_500);

/// How many run at the same time. A cluster may name any number of nodes.
const MAX_PROGRAMS: usize = 16;

/// Max size of what it prints.
const MAX_OUTPUT: usize = 64 * 1_024;

/// How often it is looked whether a program has ended.
const LOOK: Duration = Duration::from_millis(5);

/// The same while it prints nothing: something that it has started may keep its output open.
const SILENCE: Duration = Duration::from_millis(50);

/// How long the end of a killed program is waited for. One that runs as another user can't be killed.
const END: Duration = Duration::from_millis(200);

/// No host name is longer.
const MAX_HOST: usize = 253;

/// Variables with secrets of this program, which are no business of that one.
const SECRET: [&str; 5] =
    ["LEASEHOLD_STORE", "LEASEHOLD_ID", "LEASEHOLD_SERVE_TOKEN", "LEASEHOLD_SERVE_READ_TOKEN", "PGPASSWORD"];

/// The program and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AuthCommand {
    program: String,
    args: Vec<String>,
}

impl AuthCommand {
    /// Splits the option as a shell would, with its quotes and without anything else of a shell.
    pub(crate) fn parse(typed: &str) -> Result<Self, Stop> {
        let words =
            shell_words::split(typed).map_err(|_| Stop::usage("--auth-command: a quote is not closed"))?;
        let mut words = words.into_iter();
        let Some(program) = words.next().filter(|program| !program.is_empty()) else {
            return Err(Stop::usage("--auth-command is empty: name the program that prints the credentials"));
        };
        Ok(Self { program, args: words.collect() })
    }

    /// Runs the program for this server. Blocks the thread, for [`LIMIT`] at most.
    pub(crate) fn credentials(&self, request: &CredentialRequest) -> Result<Credentials, String> {
        if !is_host(request) {
            return Err("--auth-command is not started for a server whose name is no host name".to_owned());
        }
        let given = self
            .run(request)
            .and_then(|output| parse(&output).map_err(|what| format!("what it printed {what}")));
        given.map_err(|what| format!("--auth-command {}: {what}", self.program))
    }

    fn run(&self, request: &CredentialRequest) -> Result<String, String> {
        let until = Instant::now() + LIMIT;
        let _place = ProgramPlace::take(until).ok_or("too many of these programs run, for other servers")?;
        let mut program =
            self.started_for(request).map_err(|error| format!("it could not be started: {error}"))?;
        let output = program.output(until)?;
        let status = program.status(until)?;
        if !status.success() {
            return Err(format!("it failed ({status}); what it writes to stderr is shown on a terminal"));
        }
        String::from_utf8(output).map_err(|_| "it printed no text in UTF-8".to_owned())
    }

    fn started_for(&self, request: &CredentialRequest) -> io::Result<Running> {
        let mut command = process::Command::new(&self.program);
        for name in SECRET {
            command.env_remove(name);
        }
        command
            .args(&self.args)
            .env("LEASEHOLD_AUTH_ROLE", request.role.as_str())
            .env("LEASEHOLD_AUTH_HOST", &request.host)
            .env("LEASEHOLD_AUTH_PORT", request.port.map(|port| port.to_string()).unwrap_or_default())
            .env("LEASEHOLD_AUTH_USER", request.user.as_deref().unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(if io::stderr().is_terminal() { Stdio::inherit() } else { Stdio::null() });
        // Its thread is this one, which waits for its end.
        die_with_parent(&mut command);
        let (child, own) = Own::spawn(&mut command)?;
        let group = i32::try_from(child.id()).map_err(io::Error::other)?;
        groups().insert(group);
        Ok(Running { child: Some((child, own)), group, status: None })
    }
}

/// One of [`MAX_PROGRAMS`].
struct ProgramPlace;

static TAKEN: Mutex<usize> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

impl ProgramPlace {
    /// Waits for one.
    fn take(until: Instant) -> Option<Self> {
        let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        let waited = FREED.wait_timeout_while(taken, left, |taken| *taken >= MAX_PROGRAMS);
        let (mut taken, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *taken += 1;
        Some(Self)
    }
}

impl Drop for ProgramPlace {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        FREED.notify_one();
    }
}

/// The process groups of programs that run.
static GROUPS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

fn groups() -> MutexGuard<'static, BTreeSet<i32>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn kill(group: i32) {
    let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
}

/// Kills the programs that still run, and what they have started. For the end of leasehold.
pub(crate) fn kill_running() {
    groups().iter().copied().for_each(kill);
}

/// A program that was started, in a process group of its own.
struct Running {
    /// None once it is left to another thread.
    child: Option<(process::Child, Own)>,
    group: i32,
    /// Once it has ended.
    status: Option<ExitStatus>,
}

impl Running {
    /// What it prints until it closes its output, or has ended.
    fn output(&mut self, until: Instant) -> Result<Vec<u8>, String> {
        let mut output = Vec::new();
        let pipe = self.child.as_mut().and_then(|(child, _)| child.stdout.take());
        let Some(mut pipe) = pipe else { return Ok(output) };
        let unreadable = |error: io::Error| format!("what it prints can't be read: {error}");
        loop {
            let look_at = until.min(Instant::now() + SILENCE);
            if !is_readable(&pipe, look_at).map_err(unreadable)? {
                if self.has_ended()? {
                    return Ok(output);
                }
                if Instant::now() >= until {
                    return Err(self.too_late());
                }
                continue;
            }
            let mut part = [0; 4_096];
            match pipe.read(&mut part) {
                Ok(0) => return Ok(output),
                Ok(count) => output.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(unreadable(error)),
            }
            if output.len() > MAX_OUTPUT {
                return Err(format!("it printed more than {} KiB", MAX_OUTPUT / 1_024));
            }
        }
    }

    fn has_ended(&mut self) -> Result<bool, String> {
        if let (None, Some((child, _))) = (self.status, &mut self.child) {
            self.status = child.try_wait().map_err(|error| format!("it can't be waited for: {error}"))?;
        }
        Ok(self.status.is_some())
    }

    fn status(&mut self, until: Instant) -> Result<ExitStatus, String> {
        loop {
            self.has_ended()?;
            if let Some(status) = self.status {
                return Ok(status);
            }
            if Instant::now() >= until {
                return Err(self.too_late());
            }
            thread::sleep(LOOK);
        }
    }

    fn too_late(&self) -> String {
        if self.is_stopped() {
            return "it was stopped, and is killed: it is in the background, so it may not ask on the terminal, nor write there after \
                    stty tostop"
                .to_owned();
        }
        format!("it did not end within {LIMIT:?}, and is killed, unless it runs as another user")
    }

    fn is_stopped(&self) -> bool {
        let Some((child, _)) = &self.child else { return false };
        let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let only_look = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        pid.is_some_and(|pid| matches!(waitid(WaitId::Pid(pid), only_look), Ok(Some(_))))
    }
}

impl Drop for Running {
    /// Ends it and what it has started, if it has not ended by itself.
    fn drop(&mut self) {
        let group = self.group;
        if self.status.is_none() {
            kill(group);
            // Nothing else waits for it meanwhile: the lock of the groups is free.
            if self.status(Instant::now() + END).is_err()
                && let Some((mut child, own)) = self.child.take()
            {
                thread::spawn(move || {
                    let _ = child.wait();
                    groups().remove(&group);
                    drop(own);
                });
                return;
            }
        }
        groups().remove(&group);
    }
}

/// Whether the server's name may be one. Sentinels and nodes of a cluster name others, and the program may use it in a command.
fn is_host(request: &CredentialRequest) -> bool {
    let is_usual = |character: char| character.is_alphanumeric() || "-._:%".contains(character);
    let host = &request.host;
    // The path of a Unix socket is of the user's address.
    let is_socket = request.port.is_none() && host.starts_with('/') && !host.contains('\0');
    is_socket || (1..=MAX_HOST).contains(&host.len()) && !host.starts_with('-') && host.chars().all(is_usual)
}

/// Waits until something can be read, or the time is over.
fn is_readable(pipe: &ChildStdout, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&limit)) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A line with a password, or an object. An error does not repeat what was printed.
fn parse(output: &str) -> Result<Credentials, &'static str> {
    if output.trim_start().starts_with('{') {
        let object: Map<String, Value> = serde_json::from_str(output).map_err(|_| "is no JSON object")?;
        return of_object(object);
    }
    let mut lines = output.lines();
    match (lines.next(), lines.next()) {
        (Some(password), None) if !password.is_empty() => Ok(Credentials::new(password)),
        (None | Some(""), None) => Err("is empty: a line with the password is wanted, or a JSON object"),
        _ => Err("has several lines: one line with the password is wanted, or a JSON object"),
    }
}

fn of_object(object: Map<String, Value>) -> Result<Credentials, &'static str> {
    let (mut user, mut password, mut expires_at) = (None, None, None);
    for (key, value) in object {
        match (key.as_str(), value) {
            ("user" | "password" | "expires_at", Value::Null) => {}
            ("user", Value::String(text)) => user = Some(text),
            ("password", Value::String(text)) => password = Some(text),
            ("expires_at", time) => expires_at = Some(time_of(&time)?),
            _ => return Err("has other members than the strings user and password, and expires_at"),
        }
    }
    let credentials = password.map_or_else(Credentials::none, Credentials::new);
    let credentials = user.into_iter().fold(credentials, Credentials::user);
    Ok(expires_at.into_iter().fold(credentials, Credentials::expires_at))
}

/// A number of seconds since 1970, or a time as RFC 3339 has it, in UTC.
fn time_of(value: &Value) -> Result<SystemTime, &'static str> {
    let seconds = value.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = seconds.and_then(|seconds| SystemTime::UNIX_EPOCH.checked_add(seconds));
    let text = value.as_str().and_then(|text| humantime::parse_rfc3339(text).ok());
    time.or(text)
        .ok_or("has an expires_at that is neither a time as 2030-01-31T12:00:00Z nor seconds since 1970")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(output: &str) -> String {
        parse(output).map_or_else(str::to_owned, |credentials| format!("{credentials:?}"))
    }

    #[test]
    fn output_is_a_line_or_an_object() {
        assert_eq!(parse("hunter2\n"), Ok(Credentials::new("hunter2")));
        assert_eq!(parse("hun ter2\r\n"), Ok(Credentials::new("hun ter2")));
        let object = r#"{"user": "me", "password": "hunter2", "expires_at": null}"#;
        assert_eq!(parse(object), Ok(Credentials::new("hunter2").user("me")));
        assert_eq!(parse("{}"), Ok(Credentials::none()));
        for time in ["4102444800", "4102444800.5", "\"2100-01-01T00:00:00Z\""] {
            let given = shown(&format!(r#"{{"password": "hunter2", "expires_at": {time}}}"#));
            assert!(given.contains("valid_for: Some(") && !given.contains("hunter2"), "{given}");
        }
    }

    #[test]
    fn error_does_not_repeat_what_was_printed() {
        for (output, says) in [
            ("", "is empty"),
            ("\n", "is empty"),
            ("hunter2\nhunter2\n", "several lines"),
            ("{hunter2", "no JSON object"),
            (r#"{"hunter2": 1}"#, "other members"),
            (r#"{"password": ["hunter2"]}"#, "other members"),
            (r#"{"password": "a", "expires_at": "hunter2"}"#, "expires_at"),
            (r#"{"password": "a", "expires_at": -1}"#, "expires_at"),
        ] {
            let said = parse(output).unwrap_err();
            assert!(said.contains(says) && !said.contains("hunter2"), "{output}: {said}");
        }
    }

    #[test]
    fn program_is_started_for_names_of_hosts_only() {
        use leasehold::ServerRole;
        let is_started =
            |host: &str, port| is_host(&CredentialRequest::new(ServerRole::Redis, host, port, None));
        for host in ["db.example", "10.0.0.1", "2001:db8::1", "fe80::1%eth0", "bücher.example"] {
            assert!(is_started(host, Some(6379)), "{host}");
        }
        assert!(is_started("/run/redis.sock", None) && !is_started("/run/redis.sock", Some(1)));
        for host in ["", "-rf", "a b", "$(id)", "a;b", "a\nb", "../other", &"a".repeat(300)] {
            assert!(!is_started(host, Some(6379)), "{host}");
        }
    }

    #[test]
    fn only_so_many_run_at_the_same_time() {
        let soon = || Instant::now() + Duration::from_millis(20);
        let mut places: Vec<_> = (0..MAX_PROGRAMS).map(|_| ProgramPlace::take(soon()).unwrap()).collect();
        assert!(ProgramPlace::take(soon()).is_none());
        let waiting = thread::spawn(|| ProgramPlace::take(Instant::now() + LIMIT).is_some());
        drop(places.pop());
        assert!(waiting.join().unwrap());
        assert!(ProgramPlace::take(soon()).is_some() && ProgramPlace::take(soon()).is_some());
    }

    #[test]
    fn option_is_split_without_a_shell() {
        let command = AuthCommand::parse("token --host 'a b' $HOME *").unwrap();
        assert_eq!(
            (&*command.program, &command.args[..]),
            ("token", &["--host", "a b", "$HOME", "*"].map(String::from)[..])
        );
        for typed in ["", "  ", "''", "'open"] {
            assert_eq!(AuthCommand::parse(typed).unwrap_err().exit, crate::exit::Exit::Usage);
        }
    }
}
