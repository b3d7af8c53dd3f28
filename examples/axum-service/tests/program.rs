//! The program, over HTTP.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

struct Program {
    child: Child,
    address: String,
}

impl Program {
    fn start(carrier_ms: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_axum-service"))
            .envs([("LISTEN", "127.0.0.1:0"), ("LEASEHOLD_STORE", "memory:"), ("DATABASE", ":memory:")])
            .env("CARRIER_MS", carrier_ms)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self { child, address }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn call(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn until(mut holds: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < give_up, "the condition does not hold in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn concurrent_requests_for_one_order_get_one_parcel() {
    let program = Program::start("20");
    let answers = std::thread::scope(|scope| {
        let ship = || {
            let mut answer = String::new();
            until(|| {
                answer = call(&program.address, "POST /orders/1001/ship");
                // A request waits for two seconds at most, and its client then asks again.
                !answer.starts_with("HTTP/1.1 409")
            });
            answer
        };
        let requests: Vec<_> = (0..8).map(|_| scope.spawn(ship)).collect();
        requests.into_iter().map(|request| request.join().unwrap()).collect::<Vec<_>>()
    });
    for answer in answers {
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        assert!(answer.ends_with(&format!(r#"{{"id":"1001","parcel":{}}}"#, program.child.id())), "{answer}");
    }
    assert!(call(&program.address, "GET /metrics").contains("\nleasehold_wait_seconds"));
}

#[test]
fn terminated_program_answers_the_requests_in_flight() {
    let mut program = Program::start("7000");
    let address = program.address.clone();
    let request = std::thread::spawn(move || call(&address, "POST /orders/1001/ship"));
    until(|| {
        let metrics = call(&program.address, "GET /metrics");
        metrics.lines().any(|line| line.starts_with("leasehold_leases_held{") && line.ends_with(" 1"))
    });
    let pid = Pid::from_child(&program.child);
    kill_process(pid, Signal::TERM).unwrap();
    assert!(request.join().unwrap().starts_with("HTTP/1.1 200 OK"));
    let mut ended = None;
    until(|| {
        ended = program.child.try_wait().unwrap();
        ended.is_some()
    });
    assert!(ended.unwrap().success());
}
