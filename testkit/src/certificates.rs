//! Certificates for the servers and clients of one test, valid and invalid ones.
//!
//! They are PEM files in a temporary folder.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use tempfile::TempDir;

/// The subject names of valid server certificates.
const NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// A certificate and its private key.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The file with the certificate.
    pub certificate: PathBuf,
    /// The file with the key.
    pub key: PathBuf,
}

/// An authority with the certificates that it has signed. Dropping this value deletes the files.
pub struct Certificates {
    /// The authority's certificate. Another `Certificates` has another authority.
    pub authority: PathBuf,
    /// A server certificate for `localhost` and 127.0.0.1.
    pub server: Pair,
    /// A server certificate for another name.
    pub wrong_name: Pair,
    /// An expired server certificate for the right names.
    pub expired: Pair,
    /// A client certificate.
    pub client: Pair,
    /// An expired client certificate.
    pub expired_client: Pair,
    _folder: TempDir,
}

impl Certificates {
    /// Creates the authority and all certificates.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it writes files")]
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("certificates-").tempdir().expect("a temporary folder");
        let authority = Authority::new(folder.path());
        let mut expired = params("an expired server", &NAMES, ExtendedKeyUsagePurpose::ServerAuth);
        expired.not_before = date_time_ymd(2001, 1, 1);
        expired.not_after = date_time_ymd(2002, 1, 1);
        let mut server = params("a server", &NAMES, ExtendedKeyUsagePurpose::ServerAuth);
        // Cluster nodes are also clients of each other.
        server.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        let wrong_name = params("another server", &["elsewhere.test"], ExtendedKeyUsagePurpose::ServerAuth);
        let client = params("a client", &[], ExtendedKeyUsagePurpose::ClientAuth);
        let mut expired_client = params("an expired client", &[], ExtendedKeyUsagePurpose::ClientAuth);
        (expired_client.not_before, expired_client.not_after) = (expired.not_before, expired.not_after);
        Self {
            server: authority.sign("server", &server),
            wrong_name: authority.sign("wrong-name", &wrong_name),
            expired: authority.sign("expired", &expired),
            client: authority.sign("client", &client),
            expired_client: authority.sign("expired-client", &expired_client),
            authority: authority.file,
            _folder: folder,
        }
    }
}

/// What may stand in the place of a file with a certificate.
#[derive(Clone, Copy, Debug)]
pub enum NoCertificate {
    /// A named pipe that has no writer: opening it waits.
    Pipe,
    /// An empty file.
    Empty,
    /// A file with other text.
    Text,
}

impl NoCertificate {
    /// Each of them.
    pub const ALL: [Self; 3] = [Self::Pipe, Self::Empty, Self::Text];

    /// Replaces the file.
    pub fn replace(self, file: &Path) {
        fs::remove_file(file).expect("the file is there");
        match self {
            Self::Pipe => {
                let status = std::process::Command::new("mkfifo").arg(file).status();
                assert!(status.expect("mkfifo starts").success());
            }
            Self::Empty => write(file, ""),
            Self::Text => write(file, "no certificate\n"),
        }
    }
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    file: PathBuf,
}

impl Authority {
    fn new(folder: &Path) -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let file = folder.join("authority.pem");
        write(&file, &params.self_signed(&key).expect("it signs itself").pem());
        Self { issuer: Issuer::new(params, key), file }
    }

    fn sign(&self, name: &str, params: &CertificateParams) -> Pair {
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("the authority signs");
        let pair = Pair {
            certificate: self.file.with_file_name(format!("{name}.pem")),
            key: self.file.with_file_name(format!("{name}.key")),
        };
        write(&pair.certificate, &signed.pem());
        write(&pair.key, &key.serialize_pem());
        pair
    }
}

fn params(subject: &str, names: &[&str], purpose: ExtendedKeyUsagePurpose) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).expect("they are names");
    params.distinguished_name.push(DnType::CommonName, subject);
    params.extended_key_usages = vec![purpose];
    params
}

fn write(file: &Path, text: &str) {
    fs::write(file, text).expect("the folder can be written to");
}
