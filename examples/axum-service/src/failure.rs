//! Errors as answers.

use axum::extract::rejection::PathRejection;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use leasehold::ErrorKind;

/// Why a request was not answered with 200.
#[derive(Debug)]
pub(crate) enum Failure {
    UnknownOrder(String),
    /// An earlier request with this order still runs.
    InProgress(String),
    /// A later holder of the lock has written: this request was stopped for longer than its lease.
    Stale(String),
    Lock(leasehold::Error),
    Database(rusqlite::Error),
    Path(PathRejection),
}

impl From<leasehold::Error> for Failure {
    fn from(error: leasehold::Error) -> Self {
        Self::Lock(error)
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(error)
    }
}

impl From<PathRejection> for Failure {
    fn from(error: PathRejection) -> Self {
        Self::Path(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let again = [(RETRY_AFTER, "1")];
        match self {
            Self::UnknownOrder(id) => {
                (StatusCode::NOT_FOUND, format!("there is no order {id}")).into_response()
            }
            Self::InProgress(id) => {
                (StatusCode::CONFLICT, again, format!("order {id} is being shipped")).into_response()
            }
            Self::Stale(id) => {
                (StatusCode::CONFLICT, again, format!("order {id} was changed by a later request"))
                    .into_response()
            }
            Self::Lock(error) => match error.kind() {
                ErrorKind::Invalid => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
                // The lease was lost, the store did not answer, or its queue is full: another try may succeed.
                _ => {
                    eprintln!("{error:#}");
                    (StatusCode::SERVICE_UNAVAILABLE, again, "the lock service is not available")
                        .into_response()
                }
            },
            Self::Database(error) => {
                eprintln!("{error}");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
            Self::Path(error) => error.into_response(),
        }
    }
}
