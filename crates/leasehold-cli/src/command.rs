//! The command to run, which is looked up before the lock is acquired.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use crate::args::WorkArgs;
use crate::exit::{Exit, Stop};

/// The maximum length of a label, in characters.
const MAX_LABEL_CHARS: usize = 200;

#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) program: OsString,
    pub(crate) args: Vec<OsString>,
}

impl Command {
    /// The command that the arguments name, if it can be executed.
    pub(crate) fn find(work: &WorkArgs) -> Result<Self, Stop> {
        let mut words = match &work.script {
            Some(script) => vec!["/bin/sh".into(), "-c".into(), script.clone()],
            None => work.command.clone(),
        };
        if words.first().is_none_or(|program| program.is_empty()) {
            return Err(Stop::usage("there is no command to run: write it after --"));
        }
        let command = Self { program: words.remove(0), args: words };
        command.check()?;
        Ok(command)
    }

    /// The paths that `execvp` would try.
    fn paths(&self) -> Vec<PathBuf> {
        if self.program.as_bytes().contains(&b'/') {
            return vec![PathBuf::from(&self.program)];
        }
        let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
        std::env::split_paths(&path).map(|folder| folder.join(&self.program)).collect()
    }

    /// The file that will be executed, if there is one.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        self.paths().into_iter().find(|path| is_executable(path))
    }

    fn check(&self) -> Result<(), Stop> {
        let paths = self.paths();
        if paths.iter().any(|path| is_executable(path)) {
            return Ok(());
        }
        let shown = self.program.display();
        if paths.iter().any(|path| path.exists()) {
            let message =
                format!("{shown} can't be executed: it is not a file with permission to execute it");
            return Err(Stop::new(Exit::NotExecutable, message));
        }
        Err(Stop::new(Exit::NotFound, format!("{shown} was not found: check the command and PATH")))
    }

    /// The label that inspection shows: the command line, quoted for a shell.
    pub(crate) fn label(&self) -> String {
        let words = std::iter::once(&self.program).chain(&self.args).map(|word| quote(word));
        let line = words.collect::<Vec<_>>().join(" ");
        match line.char_indices().nth(MAX_LABEL_CHARS) {
            None => line,
            Some((end, _)) => format!("{}…", &line[..end]),
        }
    }
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && access(path, AccessFlags::X_OK).is_ok()
}

fn quote(word: &OsStr) -> String {
    shell_words::quote(&word.to_string_lossy()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(program: &str, args: &[&str]) -> Command {
        Command { program: program.into(), args: args.iter().map(OsString::from).collect() }
    }

    #[test]
    fn not_executable_and_not_found_have_different_exit_codes() {
        assert!(command("sh", &[]).check().is_ok());
        assert!(command("/bin/sh", &[]).check().is_ok());
        let exit = |program| command(program, &[]).check().unwrap_err().exit;
        assert_eq!(exit("/no/such/program"), Exit::NotFound);
        assert_eq!(exit("no-such-program-anywhere"), Exit::NotFound);
        assert_eq!(exit("/etc/passwd"), Exit::NotExecutable);
        assert_eq!(exit("/etc"), Exit::NotExecutable);
    }

    #[test]
    fn label_is_the_truncated_command_line() {
        assert_eq!(command("echo", &["a b", "$x"]).label(), "echo 'a b' '$x'");
        assert_eq!(command("echo", &[&"ä".repeat(500)]).label().chars().count(), MAX_LABEL_CHARS + 1);
    }
}
