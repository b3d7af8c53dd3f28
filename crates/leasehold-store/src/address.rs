//! Addresses of stores as they may be shown.

/// The parameters whose values are secret, or may have a secret in them.
const SECRET: [&str; 5] = ["pass", "password", "sentinel_password", "token", "listen"];

/// An address without its passwords. The rest is unchanged, so it still works for a user without a password.
#[must_use]
pub fn without_passwords(url: &str) -> String {
    // A path may contain anything, and is no secret.
    if url.starts_with("sqlite:") || url.starts_with("memory:") {
        return url.to_owned();
    }
    match url.strip_prefix("redlock:").filter(|nodes| !nodes.starts_with("//")) {
        // Addresses with spaces between them, so none of them has one in its password.
        Some(nodes) => {
            let nodes: Vec<_> = nodes.split_whitespace().map(node_without_secrets).collect();
            format!("redlock:{}", nodes.join(" "))
        }
        None => node_without_secrets(url),
    }
}

fn node_without_secrets(node: &str) -> String {
    let (place, query) = node.split_once('?').map_or((node, None), |(place, query)| (place, Some(query)));
    let has_password_file =
        query.is_some_and(|query| query.split('&').any(|it| it.starts_with("password_file=")));
    let place = match place.starts_with("redis+unix:") {
        true => place.to_owned(),
        false => place_without_password(place, has_password_file),
    };
    let is_public = |parameter: &&str| {
        let name = parameter.split_once('=').map_or(*parameter, |(name, _)| name);
        !SECRET.contains(&name)
    };
    let query = query.map(|query| query.split('&').filter(is_public).collect::<Vec<_>>().join("&"));
    match query {
        Some(query) if !query.is_empty() => format!("{place}?{query}"),
        _ => place,
    }
}

/// `scheme://user:password@hosts/path` without the password, and without a user that has none where it would be no user's name: Redis knows no
/// login without a password, so it is a password whose colon is missing, unless the password is in a file. As the library reads it: that of PostgreSQL ends at the first `@`, also
/// behind a slash, and any other at the last one before the path.
fn place_without_password(place: &str, has_password_file: bool) -> String {
    let Some((scheme, rest)) = place.split_once(':') else { return place.to_owned() };
    let (slashes, rest) = rest.strip_prefix("//").map_or(("", rest), |rest| ("//", rest));
    let login_of_postgres = rest.find('@').filter(|_| scheme.starts_with("postgres")).unwrap_or(0);
    let path = rest[login_of_postgres..].find('/').map_or(rest.len(), |at| login_of_postgres + at);
    let (authority, path) = rest.split_at(path);
    // libpq's other form, which no store reads: host=… password=…
    let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
    if scheme.starts_with("postgres") && hosts.contains(|c: char| c == '=' || c.is_whitespace()) {
        return format!("{scheme}:");
    }
    let Some((login, hosts)) = authority.rsplit_once('@') else { return place.to_owned() };
    let is_user = login.contains(':') || has_password_file || scheme.starts_with("postgres");
    let user = login.split(':').next().filter(|_| is_user).unwrap_or_default();
    let at = if user.is_empty() { "" } else { "@" };
    format!("{scheme}:{slashes}{user}{at}{hosts}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_address_omits_only_passwords() {
        for (given, shown) in [
            ("redis://:hunter2@host:1/2?protocol=2", "redis://host:1/2?protocol=2"),
            ("rediss://me:hun:ter2@host?ca=/a&key=/b", "rediss://me@host?ca=/a&key=/b"),
            ("redis:me:hunter2@host", "redis:me@host"),
            ("redis+unix:///run/a@b?user=me&pass=hunter2&db=1", "redis+unix:///run/a@b?user=me&db=1"),
            ("redis+unix:///run/a?password=hunter2", "redis+unix:///run/a"),
            (
                "redis-sentinel://me:hunter2@a,b/service?sentinel_user=you&sentinel_password=hunter2",
                "redis-sentinel://me@a,b/service?sentinel_user=you",
            ),
            (
                "postgres://me:hunter2@db:1/app?schema=a&password=hunter2&listen=postgres://me:hunter2@db",
                "postgres://me@db:1/app?schema=a",
            ),
            ("redlock://:hunter2@a,b,c?max_ttl_ms=5", "redlock://a,b,c?max_ttl_ms=5"),
            (
                "redlock:redis://:hunter2@a rediss://me:hunter2@b ?unfenced",
                "redlock:redis://a rediss://me@b ?unfenced",
            ),
            ("postgres://me:hun/ter2@db/app", "postgres://me@db/app"),
            // Its first `@` ends the login.
            ("postgres://me:hunter2@db/a@b", "postgres://me@db/a@b"),
            ("postgres://me:hunter2@db/a@b/c", "postgres://me@db/a@b/c"),
            ("redis-sentinel://a:26379,b/my@service", "redis-sentinel://a:26379,b/my@service"),
            ("postgres:me:hun://ter2@db/app", "postgres:me@db/app"),
            ("redis://:two hunter2@host", "redis://host"),
            ("redis://me:redis+unix:hunter2@host", "redis://me@host"),
            ("redlock:redis://:a@h1\tredis://:hunter2@h2", "redlock:redis://h1 redis://h2"),
            ("redlock:\n redis://:a@h1\n redis://:hunter2@h2\n", "redlock:redis://h1 redis://h2"),
            ("redlock://:two hunter2@a,b", "redlock://a,b"),
            ("postgres:host=127.0.0.1 password=hunter2", "postgres:"),
            ("postgresql://host=a password=hunter2/app", "postgresql:"),
            ("sqlite:/a b/c@d?synchronous=full", "sqlite:/a b/c@d?synchronous=full"),
            ("redis://host", "redis://host"),
            // Its colon is missing.
            ("redis://hunter2@host", "redis://host"),
            ("rediss:hunter2@host/1", "rediss:host/1"),
            ("redis://me@host?password_file=/run/redis", "redis://me@host?password_file=/run/redis"),
            ("redlock://hunter2@a,b", "redlock://a,b"),
            ("redlock:redis://hunter2@a redis://me:hunter2@b", "redlock:redis://a redis://me@b"),
            ("postgres://me@db/app", "postgres://me@db/app"),
        ] {
            assert_eq!(without_passwords(given), shown);
        }
    }
}
