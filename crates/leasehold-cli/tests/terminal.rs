//! `leasehold run` on a terminal, which `script` provides.

mod common;

use std::io::{Read as _, Write as _};
use std::process::{ChildStdin, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use common::{Place, Started, as_from_terminal, until};

/// A shell on a terminal of its own.
struct Screen {
    shell: Started,
    keys: ChildStdin,
    seen: Arc<Mutex<String>>,
}

impl Screen {
    fn new(place: &Place, line: &str) -> Self {
        let mut script = as_from_terminal("script");
        if cfg!(target_os = "macos") {
            script.args(["-q", "/dev/null", "sh", "-c", line]);
        } else {
            script.args(["-qec", line, "/dev/null"]);
        }
        script.env("LEASEHOLD_STORE", place.store()).env("LEASEHOLD", env!("CARGO_BIN_EXE_leasehold"));
        script.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = Started(script.spawn().expect("script runs"));
        let keys = shell.0.stdin.take().expect("piped");
        let mut output = shell.0.stdout.take().expect("piped");
        let seen = Arc::new(Mutex::new(String::new()));
        let shown = seen.clone();
        thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                shown.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Self { shell, keys, seen }
    }

    fn type_in(&mut self, text: &str) {
        self.keys.write_all(text.as_bytes()).expect("it listens");
        self.keys.flush().expect("it listens");
    }

    fn until_shown(&self, text: &str) {
        until(|| self.seen.lock().unwrap().contains(text).then_some(()));
    }
}

#[test]
fn command_owns_the_terminal_until_it_ends() {
    let place = Place::new();
    let line = "\"$LEASEHOLD\" run a -c 'read -r x; echo \"command $x\"'; read -r y; echo \"shell $y\"";
    let mut screen = Screen::new(&place, line);
    screen.type_in("one\n");
    screen.until_shown("command one");
    screen.type_in("two\n");
    screen.until_shown("shell two");
    assert_eq!(screen.shell.end(), 0);
}

#[test]
fn ctrl_c_goes_to_the_command_alone() {
    let place = Place::new();
    let line = "trap : INT; \"$LEASEHOLD\" run a -c 'trap \"echo stopping; exit 9\" INT; echo ready; while :; do sleep 0.05; done'; \
         echo \"ended with $?\"";
    let mut screen = Screen::new(&place, line);
    screen.until_shown("ready");
    screen.type_in("\x03");
    screen.until_shown("stopping");
    screen.until_shown("ended with 9");
    assert_eq!(place.locks().as_array().unwrap().len(), 0);
}

#[test]
fn ctrl_z_stops_command_and_leasehold_until_the_shell_continues_both() {
    let place = Place::new();
    // An interactive shell has job control.
    let mut screen = Screen::new(&place, "PS1='$ ' exec bash --norc -i");
    screen.type_in("\"$LEASEHOLD\" run a -c 'echo be''gun; read -r x; echo \"command $x\"'\n");
    screen.until_shown("begun");
    screen.type_in("\x1a");
    screen.until_shown("Stopped");
    screen.type_in("fg\n");
    screen.type_in("on\n");
    screen.until_shown("command on");
    screen.type_in("echo en''ded\n");
    screen.until_shown("ended");
    screen.type_in("exit\n");
    screen.shell.end();
}

#[test]
fn ctrl_c_cancels_the_wait() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "--", "sleep", "60"]);
    place.until_held("a");
    let mut screen = Screen::new(&place, "trap : INT; \"$LEASEHOLD\" run a -- true; echo \"ended with $?\"");
    place.until_waiting("a", 1);
    screen.type_in("\x03");
    screen.until_shown("ended with 130");
    place.until_waiting("a", 0);
    holder.signal("TERM");
    holder.end();
}

#[test]
fn status_line_names_the_holder() {
    let place = Place::new();
    let mut holder = place.start(&["run", "--label", "the holder", "a", "--", "sleep", "60"]);
    place.until_held("a");
    let screen = Screen::new(&place, "stty cols 200; \"$LEASEHOLD\" run a -- echo granted");
    screen.until_shown("waiting for \"a\": 1st in the queue; held by");
    screen.until_shown("the holder");
    holder.signal("TERM");
    holder.end();
    screen.until_shown("granted");
    let seen = screen.seen.lock().unwrap().clone();
    let line = seen.find("waiting for \"a\"").unwrap();
    assert!(seen[line..].contains("\r\u{1b}[K"), "the line is cleared before the command speaks: {seen:?}");
}

#[test]
fn lock_that_is_not_acquired_is_explained_on_a_terminal() {
    let place = Place::new();
    let mut holder = place.start(&["run", "--label", "the holder", "a", "-c", "echo on; exec sleep 60"]);
    assert_eq!(holder.line(), "on");
    for (options, name) in [("-n", "a"), ("-w 0.5", "a"), ("acquire -n", "a")] {
        let action = if options.starts_with("acquire") { "" } else { "run" };
        let command = if action.is_empty() { "" } else { "-- true" };
        // The second is about the time to connect on a busy machine.
        let line = format!(
            "stty cols 200; until \"$LEASEHOLD\" {action} {options} {name} {command}; [ $? = 1 ]; do :; done; echo \"code $?\""
        );
        let mut screen = Screen::new(&place, &line);
        screen.until_shown("leasehold: \"a\" not acquired: held by ");
        screen.until_shown("(the holder)");
        screen.until_shown("code 0");
        assert_eq!(screen.shell.end(), 0, "{options}");
    }
    // Without a terminal it is silent, as flock is.
    assert_eq!(place.code(&["run", "-n", "a", "--", "true"]), (1, String::new()));
    holder.signal("TERM");
    holder.end();
}
