//! The paths of the API, and what every request passes: its origin, its token, and the count of its answer.

mod events;
mod leases;
mod locks;
mod pages;
mod request;

use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::handler::Handler as _;
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};

use crate::app::App;
use crate::caller::Caller;
use crate::description::METHODS;
use crate::places::Peer;
use crate::problem::{Code, Problem};
use crate::rights::Right;
use request::{cut, receive_body};

/// How a request came in.
#[derive(Clone)]
pub(crate) enum Transport {
    /// The permissions of the socket have decided who may connect.
    Unix(Caller),
    /// The request needs a token.
    Tcp(Arc<Peer>),
}

impl Transport {
    pub(crate) fn peer(&self) -> Option<&Arc<Peer>> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(peer) => Some(peer),
        }
    }
}

/// A path of the API with one method.
struct Route {
    #[cfg_attr(not(test), expect(dead_code, reason = "the tests compare it with the description"))]
    method: Method,
    path: &'static str,
    /// None: no token is needed.
    needs: Option<Right>,
    handler: MethodRouter<Arc<App>>,
}

fn routes() -> Vec<Route> {
    let route = |method, path, needs, handler| Route { method, path, needs, handler };
    let [read, write, force] = Right::ALL.map(Some);
    let lock = "/v1/locks/{kind}/{name}";
    vec![
        route(Method::GET, "/", None, get(pages::dashboard)),
        route(Method::GET, "/healthz", None, get(pages::health)),
        route(Method::GET, "/v1/openapi.json", None, get(pages::description)),
        route(Method::GET, "/metrics", read, get(pages::metrics)),
        route(Method::GET, "/v1/access", read, get(pages::access)),
        route(Method::GET, "/v1/events", read, get(events::locks)),
        route(Method::GET, "/v1/locks", read, get(locks::list)),
        route(Method::GET, lock, read, get(locks::show)),
        route(Method::POST, "/v1/locks/{kind}/{name}/acquire", write, post(locks::acquire)),
        route(Method::POST, "/v1/locks/acquire", write, post(locks::acquire_all)),
        route(Method::POST, "/v1/leases/renew", write, post(leases::renew)),
        route(Method::POST, "/v1/leases/release", write, post(leases::release)),
        route(Method::POST, "/v1/locks/{kind}/{name}/force-release", force, post(locks::force_release)),
    ]
}

/// The service of all connections.
pub(crate) fn router(app: Arc<App>) -> Router {
    let mut router = Router::new();
    let received = from_fn_with_state(app.clone(), receive_body);
    for Route { method: _, path, needs, handler } in routes() {
        let checked = from_fn_with_state((app.clone(), needs), check_caller);
        // The body is received after the checks: without a token, nothing is waited for.
        router = router.route(path, handler.layer(received.clone()).layer(checked));
    }
    router
        .fallback(unknown_path.layer(received.clone()))
        .method_not_allowed_fallback(unknown_method.layer(received))
        .layer(from_fn(check_origin))
        .layer(from_fn_with_state(app.clone(), count))
        .with_state(app)
}

async fn unknown_path(request: Request) -> Problem {
    Problem::new(Code::UnknownPath, format!("there is no path {:?}", cut(request.uri().path())))
}

async fn unknown_method(request: Request) -> Problem {
    let (method, path) = (request.method(), cut(request.uri().path()));
    Problem::new(Code::MethodNotAllowed, format!("{path:?} has no method {:?}", cut(method.as_str())))
}

/// Finds the caller, and refuses a request for which it lacks the right. The name of a lock is checked where it is parsed.
async fn check_caller(
    State((app, needs)): State<(Arc<App>, Option<Right>)>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let caller = match request.extensions().get::<Transport>() {
        Some(Transport::Unix(caller)) => Ok(Some(caller.clone())),
        Some(Transport::Tcp(peer)) => token_caller(&app, peer, request.headers()),
        None => Ok(None),
    };
    match needs {
        Some(right) => {
            let caller = caller?.ok_or_else(no_token)?;
            caller.has(right)?;
            request.extensions_mut().insert(caller);
        }
        // A header for another program, such as a proxy, closes no path that needs none.
        None => drop(caller),
    }
    Ok(next.run(request).await)
}

fn no_token() -> Problem {
    Problem::new(Code::Unauthorized, "there is no token in the header `Authorization`")
}

/// The caller whose token a request has, if it has one. The connection has then shown it.
fn token_caller(app: &App, peer: &Peer, headers: &HeaderMap) -> Result<Option<Caller>, Problem> {
    let Some(value) = headers.get(AUTHORIZATION) else { return Ok(None) };
    let value = value.as_bytes();
    let scheme = value.get(..7).is_some_and(|word| word.eq_ignore_ascii_case(b"bearer "));
    if !scheme {
        return Err(Problem::new(
            Code::Unauthorized,
            "the header `Authorization` does not begin with `Bearer `",
        ));
    }
    let token = value[7..].trim_ascii();
    let known = app.tokens.borrow().find(token).cloned();
    let profile =
        known.ok_or_else(|| Problem::new(Code::Unauthorized, "the server does not know this token"))?;
    peer.shows(&profile, token, app.limit_of_one_token(app.limits.connections))?;
    Ok(Some(Caller::of_token(profile, peer.address)))
}

/// Refuses requests that a browser sends for a page of another site.
///
/// The socket needs no token, and a browser may reach it through a forwarded port (`ssh -L`). A page of another site must
/// not use that, even if its name was made to resolve to this host.
async fn check_origin(request: Request, next: Next) -> Result<Response, Problem> {
    let headers = request.headers();
    check_host(&request)?;
    let host = headers.get(HOST).map(text);
    let is_own = |origin| text(origin).split_once("://").map(|(_, rest)| rest) == host;
    if !headers.get_all(ORIGIN).iter().all(is_own) {
        return Err(Problem::new(Code::ForeignOrigin, "the header `Origin` names another site"));
    }
    // A page of another site can send a GET without `Origin`.
    let says = |name: &str, value: &str| headers.get(name).is_some_and(|found| text(found) == value);
    let is_foreign = says("sec-fetch-site", "cross-site") || says("sec-fetch-site", "same-site");
    if is_foreign && !says("sec-fetch-mode", "navigate") {
        let what = "the header `Sec-Fetch-Site` says that a page of another site sends this";
        return Err(Problem::new(Code::ForeignOrigin, what));
    }
    let is_unix = matches!(request.extensions().get(), Some(Transport::Unix(_)));
    if is_unix && !host.is_none_or(is_local) {
        let what = "on the Unix socket the header `Host` is localhost, or a name without dots";
        return Err(Problem::new(Code::ForeignOrigin, what));
    }
    Ok(next.run(request).await)
}

fn text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("?")
}

/// Refuses a request that names two hosts: what is before this server may have checked the other one.
fn check_host(request: &Request) -> Result<(), Problem> {
    let invalid = |what| Err(Problem::new(Code::InvalidRequest, what));
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return invalid("there are two headers `Host`");
    }
    let target = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    if target.is_some_and(|target| host.is_none_or(|host| host.as_bytes() != target)) {
        return invalid("the request line and the header `Host` name different hosts");
    }
    Ok(())
}

/// Whether a name can't be a site of the internet.
fn is_local(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let is_plain = !name.contains('.') && !name.contains(':');
    is_plain
        || name == "[::1]"
        || name.parse::<std::net::Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}

async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    // Any word is a method; only those of the API are counted by name.
    let method = METHODS.into_iter().find(|known| request.method() == known).unwrap_or("other");
    let response = next.run(request).await;
    let path = path.as_ref().map_or("other", MatchedPath::as_str);
    app.metrics.request(method, path, response.status().as_u16());
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::DESCRIPTION;
    use serde_json::Value;

    #[test]
    fn description_has_exactly_the_paths_and_methods_of_the_server() {
        let description: Value = serde_json::from_str(DESCRIPTION).unwrap();
        let mut described: Vec<String> = Vec::new();
        for (path, operations) in description["paths"].as_object().unwrap() {
            let methods = operations.as_object().unwrap().keys().filter(|key| *key != "parameters");
            described.extend(methods.map(|method| format!("{} {path}", method.to_uppercase())));
        }
        let mut served: Vec<String> =
            routes().iter().map(|route| format!("{} {}", route.method, route.path)).collect();
        described.sort();
        served.sort();
        assert_eq!(described, served);
    }

    #[test]
    fn description_has_the_right_that_each_path_needs() {
        let description: Value = serde_json::from_str(DESCRIPTION).unwrap();
        for Route { method, path, needs, .. } in routes() {
            let operation = &description["paths"][path][method.as_str().to_lowercase()];
            let described = operation["security"][0]["token"][0].as_str();
            let expected = needs.map(Right::as_str);
            assert_eq!(described, expected, "{method} {path}");
        }
    }

    #[test]
    fn every_problem_is_described() {
        let description: Value = serde_json::from_str(DESCRIPTION).unwrap();
        let described = &description["components"]["schemas"]["Problem"]["properties"]["code"]["enum"];
        let described: Vec<_> = described.as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert_eq!(described, Code::ALL.map(Code::as_str));
        let page = include_str!("../../../docs/http-api.md");
        for code in Code::ALL {
            let row = format!("| <a id=\"{0}\"></a>`{0}` | {1} |", code.as_str(), code.status().as_u16());
            assert!(page.contains(&row), "docs/http-api.md lacks {row}");
        }
    }

    #[test]
    fn host_of_the_socket_is_local() {
        for local in
            ["localhost", "localhost:8430", "leasehold", "127.0.0.1:80", "127.8.8.8", "[::1]:80", "[::1]", ""]
        {
            assert!(is_local(local), "{local}");
        }
        for foreign in ["example.com", "evil.example:8430", "10.0.0.1", "[fe80::1]:80", "localhost.evil.com"]
        {
            assert!(!is_local(foreign), "{foreign}");
        }
    }
}
