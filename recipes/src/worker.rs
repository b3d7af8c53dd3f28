//! A process of this program, to which lines are said and which answers in lines.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::run::Outcome;

/// Whoever takes longer for one answer has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// The process. It ends with this value.
pub(crate) struct Worker {
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    _process: Child,
}

impl Worker {
    /// Starts it.
    pub(crate) fn start(command: &mut Command) -> Outcome<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn()?;
        let stdin = process.stdin.take().ok_or("the process hears nothing")?;
        let stdout = process.stdout.take().ok_or("the process says nothing")?;
        Ok(Self { stdin, lines: BufReader::new(stdout).lines(), _process: process })
    }

    /// Says a line to it.
    pub(crate) async fn tell(&mut self, line: &str) -> Outcome<()> {
        Ok(self.stdin.write_all(format!("{line}\n").as_bytes()).await?)
    }

    /// Its next line.
    pub(crate) async fn hear(&mut self) -> Outcome<String> {
        let line = timeout(LIMIT, self.lines.next_line()).await.map_err(|_| "a process says nothing")??;
        line.ok_or_else(|| "a process has ended".into())
    }
}
