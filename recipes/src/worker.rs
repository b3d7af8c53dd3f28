//! A child process of this program that exchanges lines with its parent.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::outcome::Outcome;

/// A child that takes longer for one line has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// The child process, killed when this value is dropped.
pub(crate) struct Worker {
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    _process: Child,
}

impl Worker {
    /// Starts the process.
    pub(crate) fn start(command: &mut Command) -> Outcome<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn()?;
        let stdin = process.stdin.take().ok_or("the process has no standard input")?;
        let stdout = process.stdout.take().ok_or("the process has no standard output")?;
        Ok(Self { stdin, lines: BufReader::new(stdout).lines(), _process: process })
    }

    /// Writes a line to its standard input.
    pub(crate) async fn write_line(&mut self, line: &str) -> Outcome<()> {
        Ok(self.stdin.write_all(format!("{line}\n").as_bytes()).await?)
    }

    /// Reads a line from its standard output.
    pub(crate) async fn read_line(&mut self) -> Outcome<String> {
        let line =
            timeout(LIMIT, self.lines.next_line()).await.map_err(|_| "a process does not respond")??;
        line.ok_or_else(|| "a process has ended".into())
    }
}
