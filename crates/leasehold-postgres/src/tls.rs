//! TLS to the server, with rustls, as libpq's `sslmode` describes it.

#[cfg(feature = "tls")]
pub(super) use with_tls::Connectors;
#[cfg(not(feature = "tls"))]
pub(super) use without_tls::Connectors;

/// Addresses that require TLS are refused when they are parsed.
#[cfg(not(feature = "tls"))]
mod without_tls {
    use leasehold_store::OpenError;
    use tokio_postgres::NoTls;

    use crate::url::PostgresUrl;

    pub(crate) type Connector = NoTls;

    pub(crate) struct Connectors;

    impl Connectors {
        pub(crate) fn new(_: &PostgresUrl) -> Result<Self, OpenError> {
            Ok(Self)
        }

        #[expect(clippy::unused_async, reason = "as with TLS")]
        pub(crate) async fn connector(&self) -> Connector {
            NoTls
        }
    }
}

#[cfg(feature = "tls")]
mod with_tls {
    use std::io;
    use std::path::Path;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};

    use leasehold_store::reread::{Reread, read_file};
    use leasehold_store::{BoxFuture, OpenError};
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
    use rustls::{
        CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore,
        SignatureScheme,
    };
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
    use tokio_rustls::TlsConnector;

    use crate::url::{PostgresUrl, SslFiles, SslMode};

    /// Makes a TLS session per connection.
    #[derive(Clone)]
    pub(crate) struct Connector(TlsConnector);

    /// Makes a connector for each connection, because the files that the address names may be replaced.
    pub(crate) struct Connectors {
        mode: SslMode,
        files: SslFiles,
        /// From the files as they could be read last.
        last: Arc<Reread<Connector>>,
    }

    impl Connectors {
        /// Reads the files.
        pub(crate) fn new(url: &PostgresUrl) -> Result<Self, OpenError> {
            let (mode, files) = (url.ssl_mode, url.ssl_files.clone());
            let last = Arc::new(Reread::new(connector(mode, &files)?));
            Ok(Self { mode, files, last })
        }

        /// Reads them again. While they can't be read, or do not fit each other because they are being replaced, what was read
        /// last counts.
        pub(crate) async fn connector(&self) -> Connector {
            if self.files.authority.is_some() || self.files.certificate.is_some() {
                let (mode, files) = (self.mode, self.files.clone());
                if let Err(error) = self.last.renew(move || connector(mode, &files)).await {
                    tracing::warn!(%error, "certificates not read again: the last ones are used");
                }
            }
            self.last.latest()
        }
    }

    fn connector(mode: SslMode, files: &SslFiles) -> Result<Connector, OpenError> {
        let provider = CryptoProvider::get_default()
            .cloned()
            .unwrap_or_else(|| Arc::new(rustls::crypto::ring::default_provider()));
        let unusable = |error: TlsError| OpenError::invalid(format!("TLS: {error}")).with_source(error);
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let verifier = Verifier {
            chain: chain(mode, files, &provider)?,
            is_full: mode == SslMode::VerifyFull,
            provider,
        };
        let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let config = match own_certificate(files)? {
            None => builder.with_no_client_auth(),
            Some((certificates, key)) => {
                builder.with_client_auth_cert(certificates, key).map_err(unusable)?
            }
        };
        Ok(Connector(TlsConnector::from(Arc::new(config))))
    }

    type OwnCertificate = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

    fn own_certificate(files: &SslFiles) -> Result<Option<OwnCertificate>, OpenError> {
        let (Some(certificate), Some(key)) = (&files.certificate, &files.key) else { return Ok(None) };
        let content = read_file(key).map_err(|error| unreadable(key, &error))?;
        let key_der = PrivateKeyDer::from_pem_slice(&content).map_err(|error| unreadable(key, &error))?;
        Ok(Some((certificates(certificate)?, key_der)))
    }

    fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, OpenError> {
        let content = read_file(path).map_err(|error| unreadable(path, &error))?;
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&content).collect();
        match found {
            // As while it is being written.
            Ok(none) if none.is_empty() => Err(unreadable(path, &"it has no certificate (PEM)")),
            found => found.map_err(|error| unreadable(path, &error)),
        }
    }

    fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> OpenError {
        OpenError::invalid(format!("{} can't be read: {error}", path.display()))
    }

    /// What checks the certificate's authority. As with libpq, `require` checks it too if the address names one.
    fn chain(
        mode: SslMode,
        files: &SslFiles,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Option<Arc<WebPkiServerVerifier>>, OpenError> {
        let mut roots = RootCertStore::empty();
        match &files.authority {
            Some(path) => {
                for certificate in certificates(path)? {
                    roots.add(certificate).map_err(|error| unreadable(path, &error))?;
                }
            }
            None if mode < SslMode::VerifyCa => return Ok(None),
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        let verifier = verifier
            .build()
            .map_err(|error| OpenError::invalid(format!("no certificate authority is known: {error}")))?;
        Ok(Some(verifier))
    }

    #[derive(Debug)]
    struct Verifier {
        chain: Option<Arc<WebPkiServerVerifier>>,
        /// The certificate must have the host's name.
        is_full: bool,
        provider: Arc<CryptoProvider>,
    }

    impl ServerCertVerifier for Verifier {
        fn verify_server_cert(
            &self,
            end_entity: &CertificateDer<'_>,
            intermediates: &[CertificateDer<'_>],
            server_name: &ServerName<'_>,
            ocsp_response: &[u8],
            now: UnixTime,
        ) -> Result<ServerCertVerified, TlsError> {
            let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
            match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
                Err(TlsError::InvalidCertificate(
                    CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                )) if !self.is_full => Ok(ServerCertVerified::assertion()),
                verified => verified,
            }
        }

        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, TlsError> {
            let algorithms = &self.provider.signature_verification_algorithms;
            verify_tls12_signature(message, certificate, signed, algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, TlsError> {
            let algorithms = &self.provider.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signed, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    }

    impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for Connector {
        type Stream = Session<S>;
        type TlsConnect = Handshake;
        type Error = io::Error;

        fn make_tls_connect(&mut self, domain: &str) -> io::Result<Handshake> {
            // A Unix socket has no name. Nothing is encrypted there, and so the name is not needed.
            let name = (!domain.is_empty()).then(|| ServerName::try_from(domain.to_owned())).transpose();
            let name = name.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            Ok(Handshake(self.0.clone(), name))
        }
    }

    pub(crate) struct Handshake(TlsConnector, Option<ServerName<'static>>);

    impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for Handshake {
        type Stream = Session<S>;
        type Error = io::Error;
        type Future = BoxFuture<io::Result<Session<S>>>;

        fn connect(self, stream: S) -> Self::Future {
            let Self(connector, name) = self;
            Box::pin(async move {
                let name = name.ok_or_else(|| io::Error::other("the server has no name to check"))?;
                connector.connect(name, stream).await.map(Session)
            })
        }
    }

    /// An encrypted connection.
    pub(crate) struct Session<S>(tokio_rustls::client::TlsStream<S>);

    impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Session<S> {
        fn channel_binding(&self) -> ChannelBinding {
            ChannelBinding::none()
        }
    }

    impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Session<S> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(context, buffer)
        }
    }

    impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Session<S> {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &[u8],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.0).poll_write(context, buffer)
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(context)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(context)
        }
    }
}
