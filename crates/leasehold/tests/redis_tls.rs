//! Encrypted connections: who is trusted, and what is said about those who are not.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::Client;
use leasehold_testkit::{Certificates, NoCertificate, Server, until};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

async fn error_of(url: &str) -> String {
    let error = Client::connect(url).await.expect_err("it must not be trusted");
    assert!(error.is_unavailable(), "{error}");
    error.to_string()
}

#[tokio::test]
async fn certificate_is_checked_for_authority_name_and_validity() {
    let files = Certificates::new();
    let ca = format!("?ca={}", files.authority.display());
    let good = Server::builder().tls(&files.server, &files.authority).start();
    let client = Client::connect(&format!("{}{ca}", good.url())).await.unwrap();
    assert!(client.mutex("a").try_lock().await.unwrap().is_some());
    assert!(error_of(&good.url()).await.contains("ca=PATH"), "the system does not know this authority");

    let other = Server::builder().tls(&files.wrong_name, &files.authority).start();
    let error = error_of(&format!("{}{ca}", other.url())).await;
    assert!(error.contains("for another name"), "{error}");

    let old = Server::builder().tls(&files.expired, &files.authority).start();
    let error = error_of(&format!("{}{ca}", old.url())).await;
    assert!(error.contains("expired"), "{error}");
}

/// A proxy that serves several servers chooses one by the name that the client asks for.
#[tokio::test]
async fn name_of_the_host_is_in_the_first_message() {
    let files = Certificates::new();
    let server = Server::builder().tls(&files.server, &files.authority).start();
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, target) = (proxy.local_addr().unwrap().port(), server.port());
    let named = Arc::new(AtomicUsize::new(0));
    let seen = named.clone();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = proxy.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let seen = seen.clone();
            tokio::spawn(async move {
                let mut first = [0; 4_096];
                let length = client.peek(&mut first).await.unwrap();
                // The extension server_name: its type, two lengths, and the name.
                let name = [&[0, 0, 0, 14, 0, 12, 0, 0, 9][..], b"localhost"].concat();
                let has_name = first[..length].windows(name.len()).any(|part| part == name);
                seen.fetch_add(usize::from(has_name), Ordering::SeqCst);
                let mut server = TcpStream::connect(("127.0.0.1", target)).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    let client = Client::connect(&format!("rediss://localhost:{port}?ca={}", files.authority.display()))
        .await
        .unwrap();
    assert!(client.mutex("a").try_lock().await.unwrap().is_some());
    until(async || connections.load(Ordering::SeqCst) == 3).await;
    until(async || named.load(Ordering::SeqCst) == 3).await;
}

#[tokio::test]
async fn client_certificate_is_supported() {
    let files = Certificates::new();
    let strict =
        Server::builder().tls(&files.server, &files.authority).setting("tls-auth-clients", "yes").start();
    let url = format!("{}?ca={}", strict.url(), files.authority.display());
    let error = error_of(&url).await;
    assert!(error.contains("cert=PATH"), "{error}");
    let (cert, key) = (files.client.certificate.display(), files.client.key.display());
    let client = Client::connect(&format!("{url}&cert={cert}&key={key}")).await.unwrap();
    assert!(client.mutex("a").try_lock().await.unwrap().is_some());
    for (parameters, what) in
        [("&cert=/no/such/file&key=/no/such/file", "can't be read"), (&format!("&cert={cert}"), "two files")]
    {
        let error = Client::connect(&format!("{url}{parameters}")).await.unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains(what), "{error}");
    }
}

#[tokio::test]
async fn plain_and_tls_ports_are_distinguished() {
    let files = Certificates::new();
    let encrypted = Server::builder().tls(&files.server, &files.authority).start();
    let plain = Server::on_port();
    let error = error_of(&plain.url().replace("redis:", "rediss:")).await;
    assert!(error.contains("does not speak TLS") || error.contains("one for TLS"), "{error}");
    let error = error_of(&encrypted.url().replace("rediss:", "redis:")).await;
    assert!(error.contains("no Redis server") || error.contains("speak TLS only"), "{error}");
}

#[tokio::test]
async fn refused_client_certificate_is_not_called_the_servers() {
    let (files, others) = (Certificates::new(), Certificates::new());
    let strict =
        Server::builder().tls(&files.server, &files.authority).setting("tls-auth-clients", "yes").start();
    let refused = [
        (&files.expired_client, "the client certificate (cert=PATH) has expired"),
        // The other authority has the same name, so the server finds that its signature is wrong.
        (&others.client, "the client certificate (cert=PATH)"),
    ];
    for (pair, what) in refused {
        let (ca, cert, key) = (&files.authority, &pair.certificate, &pair.key);
        let parameters = format!("?ca={}&cert={}&key={}", ca.display(), cert.display(), key.display());
        let error = error_of(&format!("{}{parameters}", strict.url())).await;
        assert!(error.contains(what), "{error}");
    }
}

#[tokio::test]
async fn renewed_certificates_are_read_at_the_next_connect() {
    let (old, new) = (Certificates::new(), Certificates::new());
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let install = |files: &Certificates| {
        std::fs::copy(&files.authority, path("ca")).unwrap();
        std::fs::copy(&files.client.certificate, path("cert")).unwrap();
        std::fs::copy(&files.client.key, path("key")).unwrap();
    };
    install(&old);
    let server =
        Server::builder().tls(&old.server, &old.authority).setting("tls-auth-clients", "yes").start();
    let [ca, cert, key] = ["ca", "cert", "key"].map(|name| path(name).display().to_string());
    let client = Client::connect(&format!("{}?ca={ca}&cert={cert}&key={key}", server.url())).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    // The server gets the certificates of another authority, and so does the client, whose key comes last.
    let settings = [
        ("tls-cert-file", &new.server.certificate),
        ("tls-key-file", &new.server.key),
        ("tls-ca-cert-file", &new.authority),
    ];
    let settings = settings.map(|(name, file)| [name.to_owned(), file.display().to_string()]).concat();
    let change: Vec<&str> =
        ["CONFIG", "SET"].into_iter().chain(settings.iter().map(String::as_str)).collect();
    server.run(&change);
    std::fs::copy(&new.authority, path("ca")).unwrap();
    std::fs::copy(&new.client.certificate, path("cert")).unwrap();
    for kind in ["normal", "pubsub"] {
        server.run(&["CLIENT", "KILL", "TYPE", kind]);
    }
    until(async || guard.renew().await.is_err()).await;
    std::fs::copy(&new.client.key, path("key")).unwrap();
    until(async || client.mutex("b").try_lock().await.is_ok()).await;
}

/// The key comes later. Meanwhile the certificate would fit no key, and the connection is lost.
#[tokio::test]
async fn certificate_that_is_being_replaced_costs_no_lease() {
    let (old, new) = (Certificates::new(), Certificates::new());
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::copy(&old.client.certificate, path("cert")).unwrap();
    std::fs::copy(&old.client.key, path("key")).unwrap();
    let server =
        Server::builder().tls(&old.server, &old.authority).setting("tls-auth-clients", "yes").start();
    let [cert, key] = ["cert", "key"].map(|name| path(name).display().to_string());
    let url = format!("{}?ca={}&cert={cert}&key={key}", server.url(), old.authority.display());
    let client = Client::connect(&url).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(60)).lock().await.unwrap();
    std::fs::copy(&new.client.certificate, path("cert")).unwrap();
    for kind in ["normal", "pubsub"] {
        server.run(&["CLIENT", "KILL", "TYPE", kind]);
    }
    until(async || guard.renew().await.is_ok()).await;
    assert!(guard.is_held());
}

/// Whatever stands in the place of a certificate: nothing waits for it, and what was read last counts.
#[tokio::test]
async fn certificate_that_is_no_file_any_more_is_not_waited_for() {
    let files = Certificates::new();
    let server = Server::builder().tls(&files.server, &files.authority).start();
    let folder = tempfile::tempdir().unwrap();
    let authority = folder.path().join("ca.pem");
    std::fs::copy(&files.authority, &authority).unwrap();
    let url = format!("{}?ca={}", server.url(), authority.display());
    let client = Client::connect(&url).await.unwrap();
    let guard = client.mutex("a").ttl(Duration::from_secs(10)).lock().await.unwrap();
    for what in NoCertificate::ALL {
        what.replace(&authority);
        server.query::<i64>(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
        until(async || client.mutex("b").try_lock().await.is_ok()).await;
        guard.renew().await.unwrap();
        let error = tokio::time::timeout(Duration::from_secs(30), Client::connect(&url))
            .await
            .unwrap_or_else(|_| panic!("{what:?}"))
            .unwrap_err();
        assert!(error.to_string().contains("ca.pem"), "{what:?}: {error}");
    }
    guard.release().await.unwrap();
}
