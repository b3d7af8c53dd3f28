//! Failed TLS handshakes, explained in the words of the address. Which files are read, and when, is the stores' business.

/// The parameters of an address that name certificate files.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// The file of authorities.
    pub authority: &'static str,
    /// The client's certificate.
    pub certificate: &'static str,
    /// The client's key.
    pub key: &'static str,
}

/// How the TLS library reports what the other side has refused.
const ALERT: &str = "fatal alert";

/// Explains the text of an error; `None` if it is about no certificate. An alert is the server's word about the client's
/// certificate; any other error is about the server's.
pub fn explain(text: &str, parameters: Parameters) -> Option<String> {
    let Parameters { authority, certificate, key } = parameters;
    let lower = text.to_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    // Some alerts do not say that they are about a certificate.
    let is_alert = says(&[ALERT]);
    if !(says(&["certificate"]) || is_alert && says(&["unknownca", "accessdenied", "decrypterror"])) {
        return None;
    }
    let what = if says(&["certificaterequired", "certificate required"]) {
        format!("the server wants a client certificate: name it with {certificate}=PATH and {key}=PATH")
    } else if is_alert && says(&["expired"]) {
        format!("the server says that the client certificate ({certificate}=PATH) has expired: renew it")
    } else if is_alert && says(&["unknownca", "unknown ca", "unknownissuer", "decrypterror"]) {
        // The last one if the server knows another authority of the same name.
        format!(
            "the server does not know the authority of the client certificate ({certificate}=PATH): use one that its CA has signed"
        )
    } else if is_alert {
        format!("the server does not accept the client certificate ({certificate}=PATH): {text}")
    } else if says(&["expired", "not valid after"]) {
        "the server's certificate has expired: renew it".to_owned()
    } else if says(&["valid for name", "notvalidforname"]) {
        "the server's certificate is for another name: write the host as the certificate names it".to_owned()
    } else if says(&["unknownissuer", "unknown issuer", "badsignature"]) {
        // The last one if another authority of the same name is known.
        format!(
            "the server's certificate is from an authority that is not known here: name it with {authority}=PATH"
        )
    } else {
        format!("the server's certificate was not accepted: {text}")
    };
    Some(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alerts_are_about_the_clients_certificate_and_other_errors_about_the_servers() {
        let parameters = Parameters { authority: "ca", certificate: "cert", key: "key" };
        for (text, expected) in [
            ("received fatal alert: CertificateExpired", "client certificate (cert=PATH) has expired"),
            ("received fatal alert: UnknownCA", "does not know the authority of the client certificate"),
            ("received fatal alert: DecryptError", "does not know the authority of the client certificate"),
            ("received fatal alert: BadCertificate", "does not accept the client certificate"),
            ("received fatal alert: CertificateRequired", "wants a client certificate"),
            (
                "invalid peer certificate: certificate expired: verification time",
                "the server's certificate has expired",
            ),
            ("invalid peer certificate: UnknownIssuer", "name it with ca=PATH"),
            ("invalid peer certificate: certificate not valid for name", "for another name"),
            ("invalid peer certificate: BadSignature", "name it with ca=PATH"),
            ("invalid peer certificate: BadEncoding", "the server's certificate was not accepted"),
        ] {
            let explained = explain(text, parameters).unwrap();
            assert!(explained.contains(expected), "{text}: {explained}");
        }
        assert_eq!(explain("connection refused", parameters), None);
    }
}
