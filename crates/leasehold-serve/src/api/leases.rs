//! Renews and releases leases by their ids, of which the store knows all that is needed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::{Extension, Json};
use leasehold::{Error, LeaseId};
use serde::{Deserialize, Serialize};

use super::request::JsonBody;
use crate::app::App;
use crate::caller::Caller;
use crate::problem::{Code, Problem};
use crate::rights::Right;
use crate::time::expires_in_ms;

/// Leases of one request.
const MAX_LEASES: usize = 500;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LeasesRequest {
    leases: Vec<String>,
}

/// What has become of one lease. The ids are not repeated: outcomes are in their order.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub(super) enum Outcome {
    Renewed {
        #[serde(flatten)]
        lease: Shown,
        expires_in_ms: u64,
    },
    Released {
        #[serde(flatten)]
        lease: Shown,
    },
    /// To a release: it was released before, or it has expired.
    AlreadyEnded {
        #[serde(flatten)]
        lease: Shown,
    },
    /// To a renewal: it was released, or it has expired, or the store has lost it. Stop the work.
    Ended {
        #[serde(flatten)]
        lease: Shown,
        detail: String,
    },
    /// The store has not confirmed it, and may have done it.
    Unknown {
        #[serde(flatten)]
        lease: Shown,
        detail: String,
    },
    /// The caller may not use the lock's name.
    NotAllowed { detail: String },
    /// It is no id of a lease.
    Invalid { detail: String },
}

/// What a lease's id says.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    kind: &'static str,
    name: String,
    token: u64,
    token_text: String,
}

impl Shown {
    pub(super) fn of(id: &LeaseId) -> Self {
        let token = id.token().get();
        Self { kind: id.kind().as_str(), name: id.name().to_owned(), token, token_text: token.to_string() }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Outcomes {
    leases: Vec<Outcome>,
}

/// The leases of a request: those that the caller may use, and the outcome of each of the others.
struct Requested {
    ids: Vec<Result<LeaseId, Outcome>>,
}

impl Requested {
    fn new(caller: &Caller, request: &LeasesRequest) -> Result<Self, Problem> {
        let count = request.leases.len();
        if count == 0 || count > MAX_LEASES {
            let what = format!("a request has the ids of 1 to {MAX_LEASES} leases, not of {count}");
            return Err(Problem::new(Code::InvalidRequest, what));
        }
        let parse = |text: &String| {
            let id: LeaseId =
                text.parse().map_err(|error: Error| Outcome::Invalid { detail: error.to_string() })?;
            match caller.may(Right::Write, id.name()) {
                Ok(()) => Ok(id),
                Err(problem) => Err(Outcome::NotAllowed { detail: problem.detail }),
            }
        };
        Ok(Self { ids: request.leases.iter().map(parse).collect() })
    }

    fn usable(&self) -> impl Iterator<Item = &LeaseId> {
        self.ids.iter().filter_map(|id| id.as_ref().ok())
    }

    /// The outcome of each lease. A request of which nothing is known is an error.
    fn answer<T>(
        self,
        answered: Vec<Result<T, Error>>,
        outcome: impl Fn(&LeaseId, Result<T, Error>) -> Outcome,
    ) -> Result<Json<Outcomes>, Problem> {
        let mut answered = answered.into_iter();
        let one = |id: Result<LeaseId, Outcome>| match id {
            Err(refused) => refused,
            Ok(id) => match answered.next() {
                Some(answer) => outcome(&id, answer),
                None => Outcome::Unknown { lease: Shown::of(&id), detail: "there was no answer".to_owned() },
            },
        };
        let leases: Vec<Outcome> = self.ids.into_iter().map(one).collect();
        if let Some(Outcome::Unknown { detail, .. }) = leases.first()
            && leases.iter().all(|outcome| matches!(outcome, Outcome::Unknown { .. }))
        {
            return Err(Problem::new(Code::StoreUnavailable, detail.clone()));
        }
        Ok(Json(Outcomes { leases }))
    }
}

pub(super) async fn renew(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    JsonBody(request): JsonBody<LeasesRequest>,
) -> Result<Json<Outcomes>, Problem> {
    let arrived = Instant::now();
    let requested = Requested::new(&caller, &request)?;
    let ids: Vec<LeaseId> = requested.usable().cloned().collect();
    let renewed: Vec<Result<Duration, Error>> = app.client.renew_leases(&ids).await;
    requested.answer(renewed, |id, renewed| {
        let lease = Shown::of(id);
        let outcome = match renewed {
            Ok(valid_for) => {
                let expires_in_ms = expires_in_ms(Instant::now() + valid_for, arrived);
                Outcome::Renewed { lease, expires_in_ms }
            }
            Err(error) if error.is_lost() => Outcome::Ended { lease, detail: format!("{error:#}") },
            Err(error) => Outcome::Unknown { lease, detail: format!("{error:#}") },
        };
        if let Outcome::Ended { .. } = outcome {
            app.metrics.lease_lost(id.kind());
            app.observer.count_loss();
        }
        outcome
    })
}

/// A release can be repeated: it never fails for a lease that has ended.
pub(super) async fn release(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    JsonBody(request): JsonBody<LeasesRequest>,
) -> Result<Json<Outcomes>, Problem> {
    let requested = Requested::new(&caller, &request)?;
    let ids: Vec<LeaseId> = requested.usable().cloned().collect();
    let released = app.client.release_leases(&ids).await;
    requested.answer(released, |id, released| {
        let lease = Shown::of(id);
        match released {
            Ok(true) => Outcome::Released { lease },
            Ok(false) => Outcome::AlreadyEnded { lease },
            Err(error) => Outcome::Unknown { lease, detail: format!("{error:#}") },
        }
    })
}
