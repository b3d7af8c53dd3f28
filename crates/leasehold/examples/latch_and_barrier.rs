//! Workers that start together, and a task that waits until all have ended.

use leasehold::Error;
use leasehold::blocking::Client;

const WORKERS: u32 = 3;

fn work(client: &Client, name: &str) -> Result<(), Error> {
    let is_leader = client.barrier("loaded", WORKERS).wait()?;
    println!("{name} begins{}", if is_leader { ", and leads" } else { "" });
    // Named, so that a worker that is started anew and counts again counts once.
    client.latch("ended", WORKERS).count_down_as(name)?;
    Ok(())
}

pub(crate) fn main() -> Result<(), Error> {
    let client = Client::connect("memory:")?;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                let client = &client;
                scope.spawn(move || work(client, &format!("worker-{number}")))
            })
            .collect();
        client.latch("ended", WORKERS).wait()?;
        println!("all have ended");
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
    })?;
    client.close()
}
