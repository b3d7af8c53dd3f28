//! The order `contend`: take the lock again and again, and report every section to the resource that it protects.
//!
//! Every report that a lock is held has a time from *before* the library was asked. A process that is stopped between the two
//! therefore never claims a time at which it no longer held the lock.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::sleep;

use crate::clock::now_ns;
use crate::library::{Failure, Lock};
use crate::protocol::Contend;

/// After a failure a task pauses, so that a library that fails at once does not keep the processor busy.
const PAUSE: Duration = Duration::from_millis(5);

/// The connection to the resource.
struct Resource {
    lines: BufReader<OwnedReadHalf>,
    out: OwnedWriteHalf,
}

impl Resource {
    async fn connect(order: &Contend, task: u32) -> Result<Self, Failure> {
        let (lines, out) = UnixStream::connect(&order.resource).await?.into_split();
        let mut resource = Self { lines: BufReader::new(lines), out };
        resource.tell(&format!("worker {task} {}", std::process::id())).await?;
        Ok(resource)
    }

    async fn tell(&mut self, line: &str) -> Result<(), Failure> {
        self.out.write_all(format!("{line}\n").as_bytes()).await?;
        Ok(())
    }

    /// Waits for the resource to have processed the line.
    async fn ask(&mut self, line: &str) -> Result<(), Failure> {
        self.tell(line).await?;
        let mut answer = String::new();
        if self.lines.read_line(&mut answer).await? == 0 {
            return Err("the resource is gone".into());
        }
        Ok(())
    }
}

/// The length of a section, and of the pause after it.
#[derive(Debug, PartialEq, Eq)]
struct Lengths {
    hold_us: u64,
    pause_us: u64,
}

impl Lengths {
    fn of(order: &Contend, task: u32, section: u64) -> Self {
        let (task, seed) = (u64::from(task), order.seed % 100);
        let part = |a: u64, b: u64| (section * a + task * b + seed) % 100;
        let is_long = part(41, 53) < order.long_percent;
        let hold_us = if is_long { order.long_us } else { order.hold_us * (part(37, 61) + 1) / 100 };
        Self { hold_us, pause_us: order.hold_us * part(29, 17) / 100 }
    }
}

pub(crate) async fn run<L: Lock>(order: &Contend, mut lock: L, task: u32) -> Result<(), Failure> {
    let mut resource = Resource::connect(order, task).await?;
    for number in 0.. {
        if now_ns() >= order.end_ns {
            break;
        }
        let lengths = Lengths::of(order, task, number);
        let parts = lock.plan(chance(order.seed, task, number));
        resource.tell(format!("want {} {parts}", now_ns()).trim_end()).await?;
        let (held, asked) = take(&mut resource, &mut lock).await?;
        section::<L>(&mut resource, order, &held, asked, lengths.hold_us).await?;
        resource.tell(&format!("leave {}", now_ns())).await?;
        match lock.give(held).await {
            Ok(()) => resource.tell(&format!("done {}", now_ns())).await?,
            Err(failure) => resource.tell(&format!("kept {} {}", now_ns(), one_line(&failure))).await?,
        }
        sleep(Duration::from_micros(lengths.pause_us)).await;
    }
    resource.tell(&format!("end {}", now_ns())).await
}

/// A number for this section, whose bits are all by chance: the finalizer of `SplitMix64`.
fn chance(seed: u64, task: u32, section: u64) -> u64 {
    let mixed =
        seed.wrapping_add(u64::from(task) << 40).wrapping_add(section).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Attempts until one succeeds. Returns when that one began, too.
async fn take<L: Lock>(resource: &mut Resource, lock: &mut L) -> Result<(L::Held, u64), Failure> {
    loop {
        let asked = now_ns();
        match lock.take(false).await {
            Ok(held) => {
                let asked = L::asked(&held).unwrap_or(asked);
                return Ok((held, asked));
            }
            Err(failure) => {
                resource.tell(&format!("fail {} {}", now_ns(), one_line(&failure))).await?;
                sleep(PAUSE).await;
            }
        }
    }
}

/// Works while the library reports the lock as held, then writes.
async fn section<L: Lock>(
    resource: &mut Resource,
    order: &Contend,
    held: &L::Held,
    asked: u64,
    hold_us: u64,
) -> Result<(), Failure> {
    let tokens: Vec<String> = L::tokens(held).iter().map(u64::to_string).collect();
    let tokens = tokens.join(",");
    let entered = now_ns();
    if !L::is_held(held) {
        return resource.tell(&format!("lost {}", now_ns())).await;
    }
    resource.ask(&format!("begin {entered} {tokens} {asked}")).await?;
    let mut left = hold_us;
    while left > 0 {
        let step = left.min(order.step_us.max(1));
        sleep(Duration::from_micros(step)).await;
        left -= step;
        let checked = now_ns();
        if !L::is_held(held) {
            return resource.tell(&format!("lost {}", now_ns())).await;
        }
        resource.tell(&format!("held {checked}")).await?;
    }
    // The lock was checked, and the write is on its way: no lock can stop it any more.
    let checked = now_ns();
    if !L::is_held(held) {
        return resource.tell(&format!("lost {}", now_ns())).await;
    }
    sleep(Duration::from_micros(order.write_us)).await;
    resource.ask(&format!("write {checked} {tokens}")).await
}

fn one_line(failure: &Failure) -> String {
    failure.to_string().replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_follow_from_the_seed_and_so_many_of_a_hundred_sections_are_long() {
        let order =
            Contend { hold_us: 1_000, long_us: 50_000, long_percent: 7, seed: 3, ..Contend::default() };
        let all: Vec<Lengths> = (0..100).map(|section| Lengths::of(&order, 2, section)).collect();
        assert_eq!(all.iter().filter(|lengths| lengths.hold_us == 50_000).count(), 7);
        assert_eq!(all, (0..100).map(|section| Lengths::of(&order, 2, section)).collect::<Vec<_>>());
        let other = Contend { seed: 4, ..order };
        assert_ne!(all[0], Lengths::of(&other, 2, 0));
    }
}
