//! A lock of a name that no program uses, which the doctor acquires and releases: all else may be well, and this refused.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Acquire, Acquisition, ClientId, Command, Kind, Name, Release, Reply, Resource};

use crate::digest::client_name;
use crate::{Batch, Call, CallResult};
use crate::{Check, Component};

/// How long the lock stays if its release fails.
const TTL: Duration = Duration::from_secs(10);

/// An acquire and a release of a client that exists only for them. `is_new`: of a name that no other trial has.
pub fn commands(is_new: bool) -> Batch {
    let mut id = [0; 16];
    // Without random numbers no client could be opened. Another trial at the same time would be in the way then.
    let _ = getrandom::fill(&mut id);
    let client = ClientId::new(u128::from_be_bytes(id));
    let name = if is_new {
        format!("leasehold doctor {}", client_name(client))
    } else {
        "leasehold doctor".to_owned()
    };
    let name = Name::new(&name).unwrap_or_else(|_| unreachable!("it is short and plain"));
    let resource = Arc::new(Resource { kind: Kind::Mutex, name });
    let acquisition = Acquisition { client, sequence: 1 };
    vec![
        Call::new(resource.clone(), Acquire::exclusive(acquisition, TTL)),
        Call::new(resource, Command::Release(Release::now(acquisition))),
    ]
}

/// Reports what was refused.
pub fn judge(results: &[CallResult], component: &mut Component) {
    let why = match results {
        [Err(error), ..] | [_, Err(error), ..] => error.message.clone(),
        [Ok(granted), Ok(released)] => match (&granted.reply, &released.reply) {
            (Reply::Granted(_), Reply::Released) => return,
            replies => format!("the store answered {replies:?}"),
        },
        _ => "the store did not answer".to_owned(),
    };
    component.danger(Check::LockTrial, "a test lock could not be acquired and released", why, None);
}

#[cfg(test)]
mod tests {
    use leasehold_core::{Answer, Failure, StoreTime};

    use super::*;
    use crate::StoreError;

    #[test]
    fn only_a_lock_that_was_granted_and_released_is_no_finding() {
        let found = |results: &[CallResult]| {
            let mut component = Component::new("a store");
            judge(results, &mut component);
            component.findings.iter().map(|finding| finding.id).collect::<Vec<_>>()
        };
        let answer = |reply| Ok(Answer { at: StoreTime::ZERO, reply });
        let refused = || Err(StoreError::new(Failure::NotSent, "the disk is full"));
        assert_eq!(found(&[refused(), refused()]), ["lock-trial"]);
        assert_eq!(found(&[answer(Reply::Busy), answer(Reply::NotHeld)]), ["lock-trial"]);
        assert_eq!(found(&[]), ["lock-trial"]);
    }
}
