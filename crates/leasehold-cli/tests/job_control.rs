//! Job control: which processes are in the foreground, which are stopped and continued, and which are not affected.

#![cfg(target_os = "linux")]

mod common;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread;

use common::{Place, Started, as_from_terminal, until};
use nix::pty::{OpenptyResult, openpty};

/// A terminal with a program on it, and all that it has shown so far.
struct Terminal {
    keyboard: File,
    shown: Arc<Mutex<String>>,
    program: Started,
}

impl Terminal {
    /// The program leads a session of its own, as after a login without a shell: no shell continues stopped jobs.
    fn start(place: &Place, program: &[&str]) -> Self {
        let OpenptyResult { master, slave } = openpty(None, None).expect("a terminal");
        let end = || Stdio::from(slave.try_clone().expect("its other end"));
        let mut command = as_from_terminal("setsid");
        command.arg("--ctty").args(program).current_dir(place.path("."));
        command.env("LEASEHOLD_STORE", place.store()).env("PS1", "$ ").env("TERM", "dumb");
        command.env("leasehold", env!("CARGO_BIN_EXE_leasehold"));
        command.stdin(end()).stdout(end()).stderr(end());
        let program = Started(command.spawn().expect("setsid is there"));
        let shown = Arc::new(Mutex::new(String::new()));
        let (mut screen, to) = (File::from(master.try_clone().expect("its near end")), shown.clone());
        thread::spawn(move || {
            let mut bytes = [0; 1024];
            // Reading fails once the other end is closed.
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                to.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Self { keyboard: File::from(master), shown, program }
    }

    fn shell(place: &Place) -> Self {
        let shell = Self::start(place, &["bash", "--norc", "--noprofile", "-i"]);
        shell.until_shows("$ ");
        shell
    }

    fn leasehold(place: &Place, args: &[&str]) -> Self {
        Self::start(place, &[&[env!("CARGO_BIN_EXE_leasehold")], args].concat())
    }

    fn types(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).expect("it takes input");
    }

    fn until_shows(&self, text: &str) {
        until(|| self.shown.lock().unwrap().contains(text).then_some(()));
    }

    /// The shell has the terminal, and can tell. What is typed is shown too, so it is not what is looked for.
    fn until_shell_answers(&mut self) {
        self.types("echo $((6 * 7))-shell\n");
        self.until_shows("42-shell");
    }

    fn until_shell_answers_again(&mut self) {
        self.types("echo $((6 * 9))-shell\n");
        self.until_shows("54-shell");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the terminal has shown:\n{}", self.shown.lock().unwrap());
        }
    }
}

const CTRL_C: &str = "\x03";
const CTRL_Z: &str = "\x1a";

/// Prints a line of its own once it has read one: `heard …`.
const READER: &str = r#"echo "o"n; read -r line; echo "heard $line""#;

#[test]
fn command_is_in_the_foreground_and_gets_ctrl_c() {
    let place = Place::new();
    // Fields 5 and 8 are its own group and that in the foreground of its terminal.
    let script = r#"trap 'echo interrupted; exit 3' INT; set -- $(cat /proc/$$/stat)
        [ "$5" = "$8" ] && [ "$5" = $$ ] && echo in the foreground; while :; do sleep 0.05; done"#;
    let mut terminal = Terminal::leasehold(&place, &["run", "a", "-c", script]);
    terminal.until_shows("in the foreground");
    terminal.types(CTRL_C);
    terminal.until_shows("interrupted");
    assert_eq!(terminal.program.end(), 3, "the command decides what it means");
}

#[test]
fn status_line_keeps_its_times_on_a_narrow_terminal() {
    let place = Place::new();
    let script = format!("echo on; exec sleep 60 # {}", "so long ".repeat(20));
    let mut holder = place.start(&["run", "a", "-c", &script]);
    assert_eq!(holder.line(), "on");
    let terminal = Terminal::leasehold(&place, &["run", "a", "--", "true"]);
    // A busy machine may skip a second.
    until(|| {
        let shown = terminal.shown.lock().unwrap();
        let times: std::collections::BTreeSet<_> = shown
            .match_indices("…) for ")
            .filter_map(|(at, text)| shown[at + text.len()..].split_once('s'))
            .filter_map(|(seconds, _)| seconds.parse::<u64>().ok())
            .collect();
        (times.len() > 1).then_some(())
    });
}

#[test]
fn command_stopped_for_longer_than_its_lease_is_killed() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    shell.types(&format!("$leasehold run --ttl 12s a -c '{READER}'\n"));
    shell.until_shows("on\r\n");
    shell.types(CTRL_Z);
    shell.until_shows("Stopped");
    assert_eq!(place.code(&["run", "a", "--", "true"]).0, 0, "the lock is free for another command");
    shell.types("fg\n");
    shell.until_shows("the command gets KILL");
    shell.types("echo $?-code\n");
    shell.until_shows("124-code");
}

#[test]
fn orphaned_stop_is_resumed() {
    let place = Place::new();
    let mut terminal = Terminal::leasehold(&place, &["run", "a", "-c", READER]);
    terminal.until_shows("on\r\n");
    terminal.types(CTRL_Z);
    terminal.types("hello\n");
    terminal.until_shows("heard hello");
    assert_eq!(terminal.program.end(), 0);
}

#[test]
fn ctrl_z_stops_a_waiting_leasehold() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    let mut shell = Terminal::shell(&place);
    shell.types("$leasehold run a -c 'echo $((6 * 7))-turn'\n");
    shell.until_shows("waiting for");
    shell.types(CTRL_Z);
    shell.until_shows("Stopped");
    shell.until_shell_answers();
    shell.types("fg\n");
    holder.signal("TERM");
    shell.until_shows("42-turn");
}

/// The signal is caught since the first term.
#[test]
fn ctrl_z_stops_a_candidate_that_waits_for_another_term() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    shell.types("$leasehold elect a -c 'echo $((6 * 7))-term; exec sleep 3'\n");
    shell.until_shows("42-term");
    let mut rival = place.start(&["elect", "a", "-c", "echo on; exec sleep 600"]);
    assert_eq!(rival.line(), "on");
    shell.until_shows("waiting for");
    shell.types(CTRL_Z);
    shell.until_shows("Stopped");
    shell.until_shell_answers();
    shell.types("kill -TERM %1; fg; echo $?-code\n");
    shell.until_shows("143-code");
    rival.signal("TERM");
    rival.end();
}

#[test]
fn background_job_does_not_take_the_terminal() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    shell.types("$leasehold run a -- sleep 60 &\n");
    place.until_held("a");
    // This one waits, and says nothing on a line that is the shell's.
    shell.types("$leasehold run a -- true &\n");
    place.until_waiting("a", 1);
    shell.until_shell_answers();
    shell.types("kill %2; wait %2; echo $?-code\n");
    shell.until_shows("143-code");
    assert!(!shell.shown.lock().unwrap().contains("waiting for"));
    shell.types("kill %1\n");
    until(|| place.locks().as_array().unwrap().is_empty().then_some(()));
}

#[test]
fn pipe_reader_keeps_the_terminal() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    let reader = r#"read -r line </dev/tty; echo "heard $line"; : >heard"#;
    shell.types(&format!(
        "$leasehold run a -c 'until [ -e heard ]; do sleep 0.05; done' | sh -c '{reader}'\n"
    ));
    place.until_held("a");
    shell.types("hello\n");
    shell.until_shows("heard hello");
    until(|| place.locks().as_array().unwrap().is_empty().then_some(()));
}

// --- In a pipeline, and beside other commands ----------------------------------------------------

#[test]
fn command_in_a_pipeline_gets_the_terminal_ctrl_z_and_ctrl_c() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    let script = r#"echo "o"n; while read -r line; do echo "heard $line"; done"#;
    shell.types(&format!("$leasehold run a -c '{script}' | tee log\n"));
    shell.until_shows("on\r\n");
    shell.types("one\n");
    shell.until_shows("heard one");
    shell.types(CTRL_Z);
    shell.until_shows("Stopped");
    shell.until_shell_answers();
    shell.types("fg\n");
    shell.types("two\n");
    shell.until_shows("heard two");
    shell.types(CTRL_C);
    place.until_unused();
    shell.until_shell_answers_again();
    let log = std::fs::read_to_string(place.path("log")).unwrap();
    assert_eq!(log, "on\nheard one\nheard two\n");
}

#[test]
fn command_between_two_pipes_can_prompt_on_the_terminal() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    // Without an echo, as for a password: this sets the terminal's modes before it reads.
    let prompt =
        r#"stty -echo </dev/tty; echo "passw"ord: >/dev/tty; read -r word </dev/tty; stty echo </dev/tty"#;
    shell.types(&format!(
        "echo input | $leasehold run a -c '{prompt}; read -r line; echo \"$line and $word\"' | cat\n"
    ));
    shell.until_shows("password:");
    shell.types("secret\n");
    shell.until_shows("input and secret");
    shell.until_shell_answers();
}

#[test]
fn pipeline_neighbour_regains_the_terminal_when_it_reads() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    let command = r#"read -r line </dev/tty; echo "command $line" >&2; : >asked; until [ -e heard ]; do sleep 0.05; done
        read -r line </dev/tty; echo "command $line" >&2"#;
    let reader = r#"until [ -e asked ]; do sleep 0.05; done; read -r line </dev/tty; echo "reader $line" >&2; : >heard; cat"#;
    shell.types(&format!("$leasehold run a -c '{command}' | sh -c '{reader}'\n"));
    place.until_held("a");
    shell.types("one\n");
    shell.until_shows("command one");
    until(|| place.path("asked").exists().then_some(()));
    shell.types("two\n");
    shell.until_shows("reader two");
    shell.types("three\n");
    shell.until_shows("command three");
    shell.until_shell_answers();
}

#[test]
fn background_job_that_reads_stops_until_it_is_in_the_foreground() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    shell.types(&format!("$leasehold run a -c '{READER}' &\n"));
    shell.until_shows("on\r\n");
    // A shell reports it with its next prompt.
    until(|| {
        shell.types("\n");
        shell.shown.lock().unwrap().contains("Stopped").then_some(())
    });
    shell.until_shell_answers();
    shell.types("fg\n");
    shell.types("hello\n");
    shell.until_shows("heard hello");
    shell.until_shell_answers_again();
}

#[test]
fn running_background_job_reads_once_it_is_in_the_foreground() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    // A shell does not continue what it did not stop, so nothing tells that the job is in the foreground now.
    shell.types(&format!(
        "$leasehold run a -c 'until [ -e go ]; do sleep 0.05; done; {READER}' | tee log &\n"
    ));
    place.until_held("a");
    shell.types("fg\n");
    shell.until_shows("tee log\r\n");
    std::fs::write(place.path("go"), "").unwrap();
    shell.until_shows("on\r\n");
    shell.types("hello\n");
    shell.until_shows("heard hello");
    shell.until_shell_answers();
}

#[test]
fn stopped_pipeline_goes_on_in_the_background() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    // The command starts no process while it is stopped: a shell that is stopped between fork and exec is not stopped itself.
    shell.types(
        "mkfifo go; $leasehold run a -c 'echo \"o\"n; read -r line <go; echo $((6 * 9))-$line' | cat\n",
    );
    shell.until_shows("on\r\n");
    shell.types(CTRL_Z);
    shell.until_shows("Stopped");
    shell.types("bg\n");
    shell.until_shell_answers();
    std::fs::write(place.path("go"), "done\n").unwrap();
    shell.until_shows("54-done");
}

#[test]
fn command_gets_the_terminal_from_a_command_beside_it() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    // The first one has the terminal when the second one asks, and reads from it later.
    let first = r#"stty echo </dev/tty; : >first; until [ -e second ]; do sleep 0.05; done"#;
    let second = r#"until [ -e first ]; do sleep 0.05; done"#;
    let script = format!(
        r#"if [ $0 = a ]; then {first}; else {second}; fi; read -r line </dev/tty; echo "$0 heard $line"; : >second"#
    );
    shell.types(&format!(
        "printf \"a\\nb\\n\" | xargs -P 2 -I {{}} $leasehold run {{}} -- sh -c '{script}' {{}}\n"
    ));
    until(|| place.path("first").exists().then_some(()));
    shell.types("one\n");
    shell.until_shows("b heard one");
    shell.types("two\n");
    shell.until_shows("a heard two");
    shell.until_shell_answers();
}

#[test]
fn ctrl_c_ends_commands_side_by_side() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    // The first has asked for the terminal, so only its group hears of the key.
    let script = r#"[ $0 = b ] || stty -echo </dev/tty; echo "o"n-$0; exec sleep 60"#;
    shell.types(&format!(
        "printf \"a\\nb\\n\" | xargs -P 2 -I {{}} $leasehold run {{}} -- sh -c '{script}' {{}}\n"
    ));
    shell.until_shows("on-a");
    shell.until_shows("on-b");
    shell.types(CTRL_C);
    place.until_unused();
    shell.until_shell_answers();
}

#[test]
fn ctrl_c_that_ends_the_command_ends_the_loop_around_it() {
    let rounds = r#"for i in 1 2 3; do $leasehold run a -c "echo $((i * 6))-round; exec sleep 60"; done"#;
    for line in [rounds.to_owned(), format!("bash -c '{rounds}'"), format!("sh -c '{rounds}'")] {
        let place = Place::new();
        let mut shell = Terminal::shell(&place);
        shell.types(&format!("{line}\n"));
        shell.until_shows("\n6-round");
        shell.types(CTRL_C);
        place.until_unused();
        shell.until_shell_answers();
        assert!(!shell.shown.lock().unwrap().contains("12-round"), "{line} went on");
    }
}

#[test]
fn ctrl_c_that_the_command_survives_leaves_the_loop_around_it_alone() {
    let place = Place::new();
    let mut shell = Terminal::shell(&place);
    let script = r#"trap : INT; echo $((i * 6))-round; until [ -e go-$i ]; do sleep 0.05; done"#;
    shell.types(&format!("for i in 1 2; do i=$i $leasehold run a -c '{script}'; done\n"));
    shell.until_shows("\n6-round");
    shell.types(CTRL_C);
    for (number, shows) in [(1, "12-round"), (2, "$ ")] {
        std::fs::write(place.path(&format!("go-{number}")), "").unwrap();
        shell.until_shows(shows);
    }
    shell.until_shell_answers();
}
