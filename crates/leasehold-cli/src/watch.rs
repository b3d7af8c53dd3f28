//! `watch`: the locks of a store as they change, on the screen or as lines.

mod changes;
#[cfg(feature = "watch")]
mod screen;
mod source;

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use crate::args::{WatchArgs, name};
use crate::exit::{Exit, Stop};
use crate::store::Store;
use source::Source;

/// The shortest interval: each poll reads all locks.
const MIN_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) async fn watch(find: impl FnOnce() -> Result<Store, Stop>, args: WatchArgs) -> Result<Exit, Stop> {
    let name = args.name.as_ref().map(name).transpose()?.map(str::to_owned);
    let store = find()?;
    let source = Source { client: store.connect().await?, url: store.public_url(), name };
    let interval = args.interval.max(MIN_INTERVAL);
    if args.json {
        return changes::follow(&source, interval, changes::Form::Json).await;
    }
    if args.plain || !io::stdout().is_terminal() {
        return changes::follow(&source, interval, changes::Form::Text).await;
    }
    #[cfg(feature = "watch")]
    return screen::show(&source, interval).await;
    #[cfg(not(feature = "watch"))]
    changes::follow(&source, interval, changes::Form::Text).await
}
