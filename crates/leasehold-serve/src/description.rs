//! The description of the API, which is also the list of all answers.

use serde_json::Value;

/// OpenAPI 3.1.
pub(crate) const DESCRIPTION: &str = include_str!("../openapi.json");

/// The methods that paths of the API have.
pub(crate) const METHODS: [&str; 2] = ["GET", "POST"];

/// The method, path and status of each answer that is described.
pub(crate) fn answers() -> Vec<(&'static str, String, u16)> {
    let description: Value = serde_json::from_str(DESCRIPTION).unwrap_or_default();
    let mut answers = Vec::new();
    for (path, operations) in description["paths"].as_object().into_iter().flatten() {
        for method in METHODS {
            let statuses = operations[method.to_lowercase()]["responses"].as_object();
            let statuses = statuses.into_iter().flatten().filter_map(|(status, _)| status.parse().ok());
            answers.extend(statuses.map(|status| (method, path.clone(), status)));
        }
    }
    answers
}
