//! TLS over TCP.

mod common;

use std::sync::Arc;

use common::{Place, READ, checked, send};
use leasehold_serve::{Config, Listen, Server, Tls};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

#[tokio::test(flavor = "multi_thread")]
async fn request_over_tls_is_answered_and_a_plain_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let files = Tls { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&files.certificate, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    let place = Place::with(|config| config.tls = Some(files.clone())).await;
    assert!(place.tcp.starts_with("https://"));

    let mut trusted = RootCertStore::empty();
    trusted.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let client = client.with_root_certificates(trusted).with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TlsConnector::from(Arc::new(client)).connect(name, place.tcp().await).await.unwrap();
    let token = format!("Bearer {READ}");
    let answer = send(stream, "GET", "/v1/locks", None, &[("authorization", &token)]).await;
    checked("GET", "/v1/locks", answer).expect(200);

    let mut plain = place.tcp().await;
    plain.write_all(b"GET /v1/locks HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut bytes = Vec::new();
    let _ = plain.read_to_end(&mut bytes).await;
    assert!(!String::from_utf8_lossy(&bytes).contains("HTTP"));
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_certificate_or_key_is_refused_by_name() {
    let place = Place::new().await;
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (good, key, other) = (place.path("cert.pem"), place.path("key.pem"), place.path("other.pem"));
    std::fs::write(&good, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let another = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&other, another.signing_key.serialize_pem()).unwrap();
    let client = place.client().await;
    for (certificate, key, says) in [
        (&key, &key, "key.pem: it has no certificate"),
        (&good, &good, "cert.pem: no private key"),
        (&place.path("missing"), &key, "missing: no certificate can be read"),
        (&good, &other, "can't be used with"),
    ] {
        let mut config = Config::new([Listen::Unix(place.path("tls-socket"))]);
        config.tls = Some(Tls { certificate: certificate.clone(), key: key.clone() });
        let refused = Server::bind(config, client.clone()).await.unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
}
