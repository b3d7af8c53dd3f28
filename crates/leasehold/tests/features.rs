//! A scheme whose feature is off is refused with an error that names the feature. Each combination of features runs this.

use leasehold::Client;

/// Addresses that no store accepts, with the feature that reads them. Nothing is connected.
const ADDRESSES: [(&str, &str, bool); 9] = [
    ("sqlite:", "sqlite", cfg!(feature = "sqlite")),
    ("redis://:secret@host:port", "redis", cfg!(feature = "redis")),
    ("redis+unix://:secret@", "redis", cfg!(feature = "redis")),
    ("redis-sentinel://:secret@host:port/a", "redis", cfg!(feature = "redis")),
    ("redis-cluster://:secret@host:port", "redis", cfg!(feature = "redis")),
    ("rediss://:secret@host/?ca=a&key=b", "tls", cfg!(feature = "tls")),
    ("redlock://:secret@host:port", "redlock", cfg!(feature = "redlock")),
    ("postgres://:secret@host:port", "postgres", cfg!(feature = "postgres")),
    ("postgresql://host/?secret=1", "postgres", cfg!(feature = "postgres")),
];

fn error_of(address: &str) -> leasehold::Error {
    pollster::block_on(Client::connect(address)).expect_err(address)
}

#[test]
fn scheme_whose_feature_is_off_is_refused_with_the_name_of_the_feature() {
    for (address, feature, is_on) in ADDRESSES {
        let scheme = address.split(':').next().unwrap();
        let (error, says) =
            (error_of(address), format!("{scheme}:… needs the feature \"{feature}\" of leasehold"));
        assert_eq!(error.to_string() == says, !is_on, "{address}: {error}");
        assert_eq!(error.is_unsupported(), !is_on, "{address}: {error}");
        assert_eq!(error.is_invalid(), is_on, "{address}: {error}");
    }
}

#[cfg(feature = "redis")]
#[test]
fn parameter_that_needs_tls_is_refused_without_it() {
    for address in [
        "redis-cluster://host?tls=true&ca=/no/such/file",
        "redis-sentinel://host/a?tls=true&ca=/no/such/file",
    ] {
        let error = error_of(address);
        assert_eq!(error.to_string().contains("the feature \"tls\""), !cfg!(feature = "tls"), "{error}");
        assert_eq!(error.is_unsupported(), !cfg!(feature = "tls"), "{error}");
    }
}

#[test]
fn memory_store_needs_no_feature() {
    let token = pollster::block_on(async {
        let client = Client::connect("memory:").await?;
        let guard = client.mutex("a").lock().await?;
        Ok::<_, leasehold::Error>(guard.token())
    });
    assert!(token.unwrap().get() > 0);
}
