//! Which store: named, or the user's own.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;

use etcetera::BaseStrategy as _;
use leasehold::Client;

use crate::exit::Stop;
use crate::say::say;

/// Connects to the store that was named, or to the file in the user's state directory, and passes on what an operator
/// should know about it.
pub(crate) async fn connect(named: Option<String>) -> Result<Client, Stop> {
    let client = connect_quietly(named).await?;
    for warning in client.warnings() {
        say(format_args!("warning: {warning}; see leasehold doctor"));
    }
    Ok(client)
}

/// The same for whoever is about to tell more than the warnings do.
pub(crate) async fn connect_quietly(named: Option<String>) -> Result<Client, Stop> {
    let url = match named {
        Some(url) => url,
        None => users_own()?,
    };
    Ok(Client::connect(&url).await?)
}

/// `$XDG_STATE_HOME/leasehold/locks.db`. Its directory is made on first use, for the user alone.
fn users_own() -> Result<String, Stop> {
    let nowhere =
        || Stop::failure("there is no home directory for the default store: set LEASEHOLD_STORE or --store");
    let strategy = etcetera::base_strategy::Xdg::new().map_err(|_| nowhere())?;
    let folder = strategy.state_dir().ok_or_else(nowhere)?.join("leasehold");
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(|error| {
        let shown = folder.display();
        Stop::failure(format!("{shown}: it can't be made: {error}; set LEASEHOLD_STORE or --store"))
    })?;
    let path = folder.join("locks.db");
    let path = path
        .to_str()
        .ok_or_else(|| Stop::failure("the home directory's path is no UTF-8: set LEASEHOLD_STORE"))?;
    Ok(format!("sqlite:{path}"))
}
