//! Many processes that contend for one lock, some of which are killed or stopped.

mod common;

use std::fs;
use std::io::BufRead as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Place, Started, as_from_terminal, until};

const PROCESSES: usize = 8;

/// Appends the token to one file, and increments the count in another, protected by the lock only: overlapping runs would lose
/// a count.
const COUNT: &str =
    r#"read -r count <"$COUNTER"; echo "$LEASEHOLD_TOKEN" >>"$TOKENS"; echo "$((count + 1))" >"$COUNTER""#;

struct Counter {
    place: Place,
}

impl Counter {
    fn new() -> Self {
        let place = Place::new();
        fs::write(place.path("counter"), "0\n").unwrap();
        fs::write(place.path("tokens"), "").unwrap();
        Self { place }
    }

    /// A process that runs the command `runs` times in sequence, each under its own `leasehold run`.
    fn start(&self, script: &str, runs: usize, options: &str) -> Started {
        let each = format!(
            "leasehold=$1; command=$2; i=0; while [ $i -lt {runs} ]; do \
             \"$leasehold\" run {options} counter -c \"$command\"; code=$?; \
             case $code in 0) ;; 124) echo lost >>\"$TOKENS.lost\" ;; *) exit $code ;; esac; i=$((i + 1)); done"
        );
        let mut shell = as_from_terminal("sh");
        shell.args(["-c", &each, "sh", env!("CARGO_BIN_EXE_leasehold"), script]);
        shell.env("LEASEHOLD_STORE", self.place.store());
        shell.env("COUNTER", self.place.path("counter")).env("TOKENS", self.place.path("tokens"));
        Started(shell.spawn().expect("a shell"))
    }

    fn count(&self) -> usize {
        fs::read_to_string(self.place.path("counter")).unwrap().trim().parse().unwrap()
    }

    fn tokens(&self) -> Vec<u64> {
        numbers(&self.place.path("tokens"))
    }
}

fn numbers(path: &Path) -> Vec<u64> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| line.parse().unwrap_or_else(|_| panic!("{line:?} is no number"))).collect()
}

/// Waits until the processes end. It fails if the runs stop for this long, and has no other limit: a debug build on a busy machine
/// is slow.
const STALL: Duration = Duration::from_secs(60);

fn wait_for(counter: &Counter, processes: &mut [Started]) {
    let mut progress = (counter.tokens().len(), Instant::now());
    for process in processes {
        while process.0.try_wait().unwrap().is_none() {
            let runs = counter.tokens().len();
            if runs != progress.0 {
                progress = (runs, Instant::now());
            }
            assert!(progress.1.elapsed() < STALL, "no run within {STALL:?}, after {runs} runs");
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(process.end(), 0);
    }
}

#[test]
fn eight_processes_count_exactly() {
    let runs = leasehold_testkit::extent(60, 500, 2_000);
    let counter = Counter::new();
    let mut processes: Vec<_> = (0..PROCESSES).map(|_| counter.start(COUNT, runs, "")).collect();
    wait_for(&counter, &mut processes);
    assert_eq!(counter.count(), PROCESSES * runs);
    let tokens = counter.tokens();
    assert_eq!(tokens.len(), PROCESSES * runs);
    assert!(tokens.is_sorted_by(|a, b| a < b), "tokens strictly rise");
    assert!(!counter.place.path("tokens.lost").exists(), "no lease was lost");
    assert_eq!(counter.place.locks().as_array().unwrap().len(), 0);
}

/// A waiter that stands still for longer than its claim window of 3 s loses its turn.
#[test]
fn grants_follow_queue_order() {
    leasehold_testkit::unless_paused_blocking(Duration::from_secs(1), assert_queue_order);
}

fn assert_queue_order() {
    let place = Place::new();
    let mut holder = place.start(&["run", "a", "--", "sleep", "60"]);
    place.until_held("a");
    let order = place.path("order");
    fs::write(&order, "").unwrap();
    let mut waiters: Vec<_> = (0..12)
        .map(|number| {
            let script = format!("echo {number} >>{}", order.display());
            let waiter = place.start(&["run", "a", "-c", &script]);
            place.until_waiting("a", number + 1);
            waiter
        })
        .collect();
    holder.signal("TERM");
    holder.end();
    for waiter in &mut waiters {
        assert_eq!(waiter.end(), 0);
    }
    assert_eq!(numbers(&order), (0..12).collect::<Vec<u64>>());
}

/// A fenced resource: it records the highest token at each read and write, and refuses lower ones. Each run appends a line to its
/// state, so a run that overwrites another loses a line. Each step is atomic, so a process can be killed at any point.
const FENCED: &str = r#"
    exec 9>"$TOKENS.lock"; flock 9
    highest=$(cat "$TOKENS.highest")
    [ "$LEASEHOLD_TOKEN" -ge "$highest" ] || { echo "$LEASEHOLD_TOKEN" >>"$TOKENS.refused"; exit 0; }
    echo "$LEASEHOLD_TOKEN" >"$TOKENS.highest.$$"; mv "$TOKENS.highest.$$" "$TOKENS.highest"
    flock -u 9
    cp "$TOKENS" "$TOKENS.$$"
    sleep 0.02
    echo "$LEASEHOLD_TOKEN" >>"$TOKENS.$$"
    flock 9
    [ "$(cat "$TOKENS.highest")" = "$LEASEHOLD_TOKEN" ] || { echo "$LEASEHOLD_TOKEN" >>"$TOKENS.refused"; exit 0; }
    mv "$TOKENS.$$" "$TOKENS"
    echo "$LEASEHOLD_TOKEN" >>"$TOKENS.done""#;

#[test]
fn counter_stays_exact_when_processes_are_killed() {
    disturb(|_, victim| {
        // Kills `leasehold` in any state: waiting, starting its command, or with its command running.
        for wrapper in children(victim.0.id()) {
            let _ = Command::new("kill").args(["-KILL", &wrapper.to_string()]).stderr(Stdio::null()).status();
        }
        victim.signal("KILL");
        victim.end();
    });
}

#[test]
fn counter_stays_exact_when_processes_are_stopped() {
    disturb(|counter, victim| {
        victim.signal("STOP");
        // Stops `leasehold` and not its command, which continues after its lease has expired.
        let wrappers = children(victim.0.id());
        let signal = |signal: &str| {
            for pid in &wrappers {
                let _ = Command::new("kill").args([signal, &pid.to_string()]).stderr(Stdio::null()).status();
            }
        };
        // A process stopped within a transaction keeps the file locked and blocks the others: docs/guarantees.md names this limit.
        // It is rare, so a few attempts suffice.
        let continues = (0..4).any(|_| {
            signal("-STOP");
            let before = counter.tokens().len();
            let continues = comes_true(Duration::from_secs(10), || {
                counter.tokens().len() > before + 5 || counter.is_nearly_done()
            });
            signal("-CONT");
            continues
        });
        assert!(continues, "the other processes continue");
        victim.signal("CONT");
        victim.signal("KILL");
        victim.end();
    });
}

fn comes_true(limit: Duration, is_so: impl Fn() -> bool) -> bool {
    let give_up = Instant::now() + limit;
    while Instant::now() < give_up {
        if is_so() {
            return true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    false
}

fn children(pid: u32) -> Vec<u32> {
    let found = Command::new("pgrep").args(["-P", &pid.to_string()]).output().expect("pgrep runs");
    String::from_utf8_lossy(&found.stdout).lines().filter_map(|line| line.parse().ok()).collect()
}

const RUNS: usize = 30;

impl Counter {
    fn is_nearly_done(&self) -> bool {
        self.tokens().len() + PROCESSES >= (PROCESSES - 1) * RUNS
    }
}

/// Runs several processes, disturbs one more with `act`, and checks that the others finish without a lost run.
fn disturb(act: impl Fn(&Counter, &mut Started)) {
    let counter = Counter::new();
    fs::write(counter.place.path("tokens.highest"), "0\n").unwrap();
    let mut processes: Vec<_> = (1..PROCESSES).map(|_| counter.start(FENCED, RUNS, "--ttl 1s")).collect();
    for round in 0..5 {
        let mut victim = counter.start(FENCED, 10_000, "--ttl 1s");
        // At a different point of its work in each round.
        let before = counter.tokens().len();
        until(|| (counter.tokens().len() > before + round * 3 || counter.is_nearly_done()).then_some(()));
        act(&counter, &mut victim);
    }
    wait_for(&counter, &mut processes);
    let tokens = counter.tokens();
    assert!(tokens.is_sorted_by(|a, b| a < b), "tokens strictly rise");
    let done = numbers(&counter.place.path("tokens.done"));
    assert!(done.iter().all(|token| tokens.binary_search(token).is_ok()), "no finished run is lost");
    // On a slow machine a lease may expire, and the resource then refuses the run.
    let refused =
        fs::read_to_string(counter.place.path("tokens.refused")).map_or(0, |text| text.lines().count());
    assert!(
        done.len() + refused >= (PROCESSES - 1) * RUNS,
        "{} runs finished, {refused} were refused",
        done.len()
    );
}

/// As process 1 of a container does, a subreaper gets the processes whose parent has ended.
#[test]
#[cfg(target_os = "linux")]
fn orphans_are_reaped_by_a_program_that_gets_them_and_the_command_keeps_its_exit_code() {
    const PR_SET_CHILD_SUBREAPER: u32 = 36;
    let become_subreaper = format!(
        "import ctypes, os, sys; assert ctypes.CDLL(None).prctl({PR_SET_CHILD_SUBREAPER}, 1, 0, 0, 0) == 0; \
         os.execv(sys.argv[1], sys.argv[1:])"
    );
    // The subshells end at once, so their children are orphans.
    let script = "(sleep 0.1 & echo $! >>$0); (sleep 60 & echo $! >>$0); (sleep 60 & echo $! >>$0); echo on; read x; exit 7";
    for action in [&["run"][..], &["elect", "--backoff", "60s"]] {
        let place = Place::new();
        let log = place.path("orphans");
        let mut command = as_from_terminal("python3");
        command.args(["-c", &become_subreaper, env!("CARGO_BIN_EXE_leasehold")]).args(action);
        command.args(["a", "--", "sh", "-c", script, log.to_str().unwrap()]);
        command
            .env("LEASEHOLD_STORE", place.store())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut running = Started(command.spawn().expect("python3 runs"));
        assert_eq!(running.line(), "on");
        let orphans = numbers(&log);
        let [short, killed, real_time] = orphans[..] else { panic!("{orphans:?}") };
        let until_reaped =
            |pid: u64| until(|| (!Path::new("/proc").join(pid.to_string()).exists()).then_some(()));
        until_reaped(short);
        // nix has no name for this one.
        common::send("34", u32::try_from(real_time).unwrap());
        until_reaped(real_time);
        common::send("KILL", u32::try_from(killed).unwrap());
        until_reaped(killed);
        assert!(running.0.try_wait().unwrap().is_none(), "the command runs");
        drop(running.0.stdin.take());
        if action[0] == "run" {
            assert_eq!(running.end(), 7);
        } else {
            let mut said = std::io::BufReader::new(running.0.stderr.take().unwrap()).lines();
            assert!(said.any(|line| line.unwrap().contains("the command ended: exit code 7")));
        }
    }
}
