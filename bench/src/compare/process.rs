//! A peer's process, and the protocol with it.

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::Duration;

use leasehold_bench_peer::protocol::{Answer, Hello, Order};
use rustix::process::{Pid, Signal, kill_process};

use super::catalog::OWN;

/// Maximum time for a start, and for an answer beyond the duration of its order.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running peer.
pub struct Process {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    /// An answer that [`Process::failure`] has read.
    early: RefCell<Option<String>>,
    /// Lets it go on if this process ends without doing so.
    resumer: Option<Resumer>,
    /// Its first message.
    pub hello: Hello,
}

/// The folder into which `bench/setup` builds the peers.
#[must_use]
pub fn built() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target")).join("peers")
}

fn command(program: &str) -> Result<Command, String> {
    if OWN.contains(&program) {
        let own =
            std::env::var_os("LEASEHOLD_BENCH").map_or_else(std::env::current_exe, |path| Ok(path.into()));
        let mut command = Command::new(own.map_err(|error| error.to_string())?);
        command.args(["peer", program]);
        return Ok(command);
    }
    let folder = built().join(program);
    if !folder.join("run").exists() {
        let why = std::fs::read_to_string(folder.join("missing"));
        return Err(why.map_or_else(
            |_| format!("it is not built: bench/setup {program}"),
            |why| format!("it could not be built: {}", why.trim()),
        ));
    }
    Ok(Command::new(folder.join("run")))
}

impl Process {
    /// Starts a peer by its name in `bench/setup`.
    ///
    /// # Errors
    ///
    /// Why it does not start.
    pub fn start(program: &str) -> Result<Self, String> {
        Self::spawn(command(program)?)
    }

    /// Starts a peer by its command.
    ///
    /// # Errors
    ///
    /// Why it does not start.
    pub fn spawn(mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| format!("it does not start: {error}"))?;
        let orders = child.stdin.take().ok_or("it has no standard input")?;
        let output = BufReader::new(child.stdout.take().ok_or("it has no standard output")?);
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let hello = Hello { library: String::new(), runtime: String::new() };
        let resumer = Some(Resumer::of(&child)?);
        let mut process = Self { child, orders, answers, early: RefCell::default(), resumer, hello };
        let first = process.line(PATIENCE)?;
        process.hello =
            serde_json::from_str(&first).map_err(|error| format!("it says {first:?}: {error}"))?;
        Ok(process)
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends an order without waiting for the answer.
    ///
    /// # Errors
    ///
    /// The peer has exited.
    pub fn tell(&mut self, order: &Order) -> Result<(), String> {
        let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        writeln!(self.orders, "{line}").map_err(|error| format!("it is gone: {error}"))
    }

    /// Waits for the answer to the last order.
    ///
    /// # Errors
    ///
    /// The error that the peer reports, or that it has exited or does not answer.
    pub fn answer(&self, within: Duration) -> Result<Answer, String> {
        read_answer(&self.line(within + PATIENCE)?)
    }

    /// Sends an order and waits for its answer.
    ///
    /// # Errors
    ///
    /// As [`Process::tell`] and [`Process::answer`].
    pub fn ask(&mut self, order: &Order, within: Duration) -> Result<Answer, String> {
        self.tell(order)?;
        self.answer(within)
    }

    /// Why it has stopped working on an order, if it has: its error, or that it has ended.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let mut early = self.early.borrow_mut();
        if early.is_none() {
            match self.answers.try_recv() {
                Ok(line) => *early = Some(line),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Some(ENDED.to_owned()),
            }
        }
        early.as_ref().and_then(|line| read_answer(line).err())
    }

    /// Takes the processor from it, or lets it go on.
    pub fn pause(&self, pauses: bool) {
        let signal = if pauses { Signal::STOP } else { Signal::CONT };
        // It fails only if the process has ended, which the next order shows.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Kills it at once, like a crash of its machine.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn line(&self, within: Duration) -> Result<String, String> {
        if let Some(line) = self.early.borrow_mut().take() {
            return Ok(line);
        }
        self.answers.recv_timeout(within).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("it has not answered for {within:?}"),
            RecvTimeoutError::Disconnected => ENDED.to_owned(),
        })
    }
}

const ENDED: &str = "it has ended";

/// The answer, or the error that it reports.
fn read_answer(line: &str) -> Result<Answer, String> {
    let answer: Answer =
        serde_json::from_str(line).map_err(|error| format!("it answers {line:?}: {error}"))?;
    match answer.error {
        Some(error) => Err(error),
        None => Ok(answer),
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        drop(self.resumer.take());
    }
}

/// A process that waits until its standard input ends, and then lets a peer go on: a peer that is stopped would not see that its own
/// standard input has ended.
struct Resumer {
    waiting: Child,
}

impl Resumer {
    fn of(peer: &Child) -> Result<Self, String> {
        let mut command = Command::new("sh");
        command.args(["-c", "read -r end; kill -CONT \"$0\"", &peer.id().to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let waiting = command.spawn().map_err(|error| format!("sh does not start: {error}"))?;
        Ok(Self { waiting })
    }
}

impl Drop for Resumer {
    fn drop(&mut self) {
        drop(self.waiting.stdin.take());
        let _ = self.waiting.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Process, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::spawn(command)
    }

    #[test]
    fn a_peer_that_is_not_built_says_what_builds_it() {
        let why = Process::start("unknown").err().unwrap();
        assert_eq!(why, "it is not built: bench/setup unknown");
    }

    #[test]
    fn what_a_peer_says_is_wrong_is_an_error() {
        let hello = r#"echo '{"library":"x 1","runtime":"sh"}'; read order; echo '{"error":"no"}'; cat"#;
        let mut process = shell(hello).unwrap();
        assert_eq!(process.hello.library, "x 1");
        assert_eq!(process.ask(&Order::Held, Duration::ZERO), Err("no".to_owned()));
    }

    fn is_stopped(process: &Process) -> bool {
        let stat = format!("/proc/{}/stat", process.pid());
        std::fs::read_to_string(stat).is_ok_and(|stat| stat.contains(") T "))
    }

    #[test]
    fn a_paused_peer_answers_when_it_goes_on() {
        let hello = r#"echo '{"library":"x 1","runtime":"sh"}'; read order; echo '{"error":"no"}'; cat"#;
        let mut process = shell(hello).unwrap();
        process.pause(true);
        leasehold_testkit::wait_until("it is stopped", || is_stopped(&process));
        process.tell(&Order::Held).unwrap();
        process.pause(false);
        assert_eq!(process.answer(Duration::ZERO), Err("no".to_owned()));
    }

    #[test]
    fn a_paused_peer_goes_on_when_the_driver_ends() {
        let mut process = shell(r#"echo '{"library":"x 1","runtime":"sh"}'; cat"#).unwrap();
        process.pause(true);
        leasehold_testkit::wait_until("it is stopped", || is_stopped(&process));
        // As the end of this process would do.
        drop(process.resumer.take());
        leasehold_testkit::wait_until("it goes on", || !is_stopped(&process));
    }

    #[test]
    fn a_peer_that_works_has_not_failed() {
        let hello = r#"echo '{"library":"x 1","runtime":"sh"}'; read order;"#;
        let mut process = shell(&format!(r#"{hello} echo '{{"error":"no"}}'; cat"#)).unwrap();
        assert_eq!(process.failure(), None);
        process.tell(&Order::Held).unwrap();
        leasehold_testkit::wait_until("it has failed", || process.failure().is_some());
        assert_eq!(process.failure().as_deref(), Some("no"));
    }

    #[test]
    fn a_peer_that_ends_or_talks_nonsense_is_an_error() {
        assert!(shell("exit 0").is_err());
        assert!(shell("echo hello; cat").is_err());
    }
}
