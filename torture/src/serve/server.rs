//! A server of the fleet as a process: it says where it listens, serves until SIGTERM, and says that it has ended.

use leasehold::Client;
use leasehold_bench_peer::protocol::{Answer, Hello};
use leasehold_serve::{Config, Listen, Server};
use tokio::signal::unix::{SignalKind, signal};

use super::TOKEN;

/// Runs it. The first line on standard output is a `Hello` whose runtime is the address.
///
/// # Errors
///
/// Why it does not start.
pub fn run(store: &str) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.map_err(|error| error.to_string())?.block_on(serve(store))
}

async fn serve(store: &str) -> Result<(), String> {
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let mut config = Config::new([Listen::Tcp("127.0.0.1:0".to_owned())]);
    config.tokens.add_write(TOKEN)?;
    let client = Client::connect(store).await.map_err(|error| error.to_string())?;
    let server = Server::bind(config, client).await.map_err(|error| error.to_string())?;
    let runtime = server.addresses().concat();
    say(&Hello { library: "leasehold serve".to_owned(), runtime })?;
    let stop = async {
        let _ = terminate.recv().await;
    };
    server.run(stop).await;
    say(&Answer::default())
}

fn say(line: &impl serde::Serialize) -> Result<(), String> {
    println!("{}", serde_json::to_string(line).map_err(|error| error.to_string())?);
    Ok(())
}
