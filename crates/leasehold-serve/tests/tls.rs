//! TLS over TCP.

mod common;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Place, READ, SOON, checked, send};
use leasehold_serve::{Config, Listen, Notices, Server, Tls};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

type Made = rcgen::CertifiedKey<rcgen::KeyPair>;

fn make() -> Made {
    rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap()
}

/// Connects a client that trusts this certificate only.
async fn connect(place: &Place, made: &Made) -> std::io::Result<TlsStream<TcpStream>> {
    let mut trusted = RootCertStore::empty();
    trusted.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let client = client.with_root_certificates(trusted).with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(client)).connect(name, place.tcp().await).await
}

/// Replaces a file at once, as tools for certificates do.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rotated_certificate_is_used_at_the_next_handshake_and_a_bad_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let files = Tls { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let (first, second, third) = (make(), make(), make());
    replace(&files.certificate, &first.cert.pem());
    replace(&files.key, &first.signing_key.serialize_pem());
    let notices: Arc<Mutex<Vec<String>>> = Arc::default();
    let reported = notices.clone();
    let place = Place::with(|config| {
        config.tls = Some(files.clone());
        config.notices = Notices::new(move |text| reported.lock().unwrap().push(text.to_owned()));
    })
    .await;
    let reported = || std::mem::take(&mut *notices.lock().unwrap());
    let old = connect(&place, &first).await.unwrap();
    // Between the two files of a rotation the pair before is in use.
    replace(&files.certificate, &second.cert.pem());
    for _ in 0..3 {
        connect(&place, &first).await.unwrap();
    }
    let problem = reported();
    assert!(problem.len() == 1 && problem[0].contains("stays in use"), "it is said once: {problem:?}");
    replace(&files.key, &second.signing_key.serialize_pem());
    connect(&place, &second).await.unwrap();
    assert!(connect(&place, &first).await.is_err(), "the old one is gone");
    assert!(reported().iter().any(|text| text.contains("the new certificate is in use")));
    for broken in ["", "no certificate", "-----BEGIN CERTIFICATE-----\n"] {
        replace(&files.certificate, broken);
        connect(&place, &second).await.unwrap();
        assert_eq!(reported().len(), 1, "{broken}");
    }
    std::fs::remove_file(&files.certificate).unwrap();
    connect(&place, &second).await.unwrap();
    assert_eq!(reported().len(), 1);
    assert!(place.control.set_tls(&files).unwrap_err().contains("no certificate can be read"));
    // Other files, on request.
    let other = Tls { certificate: folder.path().join("other.pem"), key: folder.path().join("other.key") };
    replace(&other.certificate, &third.cert.pem());
    replace(&other.key, &third.signing_key.serialize_pem());
    place.control.set_tls(&other).unwrap();
    connect(&place, &third).await.unwrap();
    // A connection stays, whatever happens to the files.
    let token = format!("Bearer {READ}");
    let answer = send(old, "GET", "/v1/locks", None, &[("authorization", &token)]).await;
    checked("GET", "/v1/locks", answer).expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_certificate_is_looked_at_without_a_handshake() {
    let folder = tempfile::tempdir().unwrap();
    let files = Tls { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let made = make();
    replace(&files.certificate, &made.cert.pem());
    replace(&files.key, &made.signing_key.serialize_pem());
    let (sender, mut notices) = tokio::sync::mpsc::unbounded_channel();
    let _place = Place::with(|config| {
        config.tls = Some(files.clone());
        config.notices = Notices::new(move |text| drop(sender.send(text.to_owned())));
    })
    .await;
    let mut next = async || tokio::time::timeout(SOON, notices.recv()).await.expect("a notice").unwrap();
    for (key, says) in
        [("no key".to_owned(), "stays in use"), (made.signing_key.serialize_pem(), "is in use")]
    {
        replace(&files.key, &key);
        // Each is reported once: the next notice is about the next change.
        let notice = next().await;
        assert!(notice.contains(says), "{notice}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn handshakes_that_do_not_end_keep_out_no_other_and_are_ended() {
    let folder = tempfile::tempdir().unwrap();
    let files = Tls { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let made = make();
    replace(&files.certificate, &made.cert.pem());
    replace(&files.key, &made.signing_key.serialize_pem());
    let start = async |seconds| {
        Place::with(|config| {
            config.tls = Some(files.clone());
            (config.limits.strangers, config.limits.connections) = (4, 4);
            config.limits.stranger_timeout = Duration::from_secs(seconds);
        })
        .await
    };
    let place = start(600).await;
    let mut open = Vec::new();
    for _ in 0..20 {
        let mut stream = place.tcp().await;
        stream.write_all(b"\x16\x03\x01").await.unwrap();
        open.push(stream);
    }
    let stream = connect(&place, &made).await.unwrap();
    let answer = send(stream, "GET", "/healthz", None, &[]).await;
    checked("GET", "/healthz", answer).expect(200);
    let place = start(1).await;
    let mut stream = place.tcp().await;
    stream.write_all(b"\x16\x03\x01").await.unwrap();
    let mut bytes = Vec::new();
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut bytes)).await.expect("it is closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn request_over_tls_is_answered_and_a_plain_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let files = Tls { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
    let made = make();
    std::fs::write(&files.certificate, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    let place = Place::with(|config| config.tls = Some(files.clone())).await;
    assert!(place.tcp.starts_with("https://"));

    let stream = connect(&place, &made).await.unwrap();
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
    let made = make();
    let (good, key, other) = (place.path("cert.pem"), place.path("key.pem"), place.path("other.pem"));
    std::fs::write(&good, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let another = make();
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
