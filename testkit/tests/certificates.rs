//! TLS: servers accept all certificates, and clients reject the invalid ones.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use leasehold_testkit::{Certificates, Cluster, Pair, Proxy, Sentinels, Server};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Sends PING over TLS to this port of `localhost`, with this authority and an optional client certificate.
fn ping(port: u16, authority: &Path, client: Option<&Pair>) -> io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let config = match client {
        None => config.with_no_client_auth(),
        Some(pair) => {
            let certificate = CertificateDer::from_pem_file(&pair.certificate).unwrap();
            let key = PrivateKeyDer::from_pem_file(&pair.key).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    let connection = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut stream = StreamOwned::new(connection, stream);
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 7];
    stream.read_exact(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn a_tls_server_rejects_plain_connections_on_its_port() {
    let certificates = Certificates::new();
    let server = Server::builder().tls(&certificates.server, &certificates.authority).start();
    assert_eq!(server.url(), format!("rediss://127.0.0.1:{}", server.port()));
    assert_eq!(ping(server.port(), &certificates.authority, None).unwrap(), "+PONG\r\n");
    let plain = redis::Client::open(format!("redis://127.0.0.1:{}", server.port())).unwrap();
    let connection = plain.get_connection_with_timeout(Duration::from_secs(10));
    assert!(
        connection.and_then(|mut connection| redis::cmd("PING").query::<String>(&mut connection)).is_err()
    );
    server.run(&["SET", "a", "1"]);
}

#[test]
fn a_proxy_forwards_tls_and_has_a_tls_url() {
    let certificates = Certificates::new();
    let server = Server::builder().tls(&certificates.server, &certificates.authority).start();
    let proxy = Proxy::before(&server);
    assert_eq!(proxy.url(), format!("rediss://127.0.0.1:{}", proxy.port()));
    assert_eq!(ping(proxy.port(), &certificates.authority, None).unwrap(), "+PONG\r\n");
}

#[test]
fn invalid_certificates_are_rejected_for_the_right_reason() {
    let certificates = Certificates::new();
    for (pair, reason) in
        [(&certificates.wrong_name, "not valid for name"), (&certificates.expired, "expired")]
    {
        let server = Server::builder().tls(pair, &certificates.authority).start();
        let error = ping(server.port(), &certificates.authority, None).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let others = Certificates::new();
    let server = Server::builder().tls(&certificates.server, &certificates.authority).start();
    let error = ping(server.port(), &others.authority, None).unwrap_err().to_string();
    assert!(error.contains("BadSignature") || error.contains("UnknownIssuer"), "{error}");
}

#[test]
fn a_server_with_client_authentication_accepts_its_authority_s_clients_only() {
    let certificates = Certificates::new();
    let builder = Server::builder().tls(&certificates.server, &certificates.authority);
    let server = builder.setting("tls-auth-clients", "yes").start();
    let answer = ping(server.port(), &certificates.authority, Some(&certificates.client));
    assert_eq!(answer.unwrap(), "+PONG\r\n");
    assert!(ping(server.port(), &certificates.authority, None).is_err());
    let others = Certificates::new();
    assert!(ping(server.port(), &certificates.authority, Some(&others.client)).is_err());
}

#[test]
fn sentinels_and_their_servers_support_tls() {
    let certificates = Certificates::new();
    let builder = Server::builder().tls(&certificates.server, &certificates.authority);
    let mut sentinels = Sentinels::of(&builder, &builder.clone().password("watcher"));
    assert!(sentinels.url("locks").ends_with("/locks?tls=true&sentinel_password=watcher"));
    for server in sentinels.servers.iter().chain(&sentinels.sentinels) {
        let answer = ping(server.port(), &certificates.authority, None).unwrap();
        assert!(answer == "+PONG\r\n" || answer == "-NOAUTH", "{answer}");
    }
    sentinels.kill_master();
}

#[test]
fn a_cluster_supports_tls() {
    let certificates = Certificates::new();
    let builder = Server::builder().tls(&certificates.server, &certificates.authority);
    let cluster = Cluster::of(&builder);
    assert!(cluster.url().starts_with("redis-cluster://127.0.0.1:") && cluster.url().ends_with("?tls=true"));
    for node in &cluster.nodes {
        assert_eq!(ping(node.port(), &certificates.authority, None).unwrap(), "+PONG\r\n");
    }
    let from = cluster.node_of("a");
    cluster.nodes[from].run(&["SET", "a", "1"]);
    let (slot, to) = (cluster.slot_of("a"), (from + 1) % 3);
    cluster.migrate_begin(slot, to);
    cluster.migrate_keys(slot, to);
    cluster.migrate_end(slot, to);
    assert_eq!(cluster.nodes[to].query::<i64>(&["GET", "a"]).unwrap(), 1);
    cluster.fail_over(to);
}
