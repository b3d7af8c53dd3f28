//! Every public type can move to another thread and be shared between threads, and none is missing from this list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use leasehold::{blocking, fence, testing};

/// A type by its path below the crate, and a proof at compile time.
macro_rules! send_and_sync {
    ($($type:path),* $(,)?) => {{
        fn proven<T: Send + Sync + 'static>() {}
        $(proven::<$type>();)*
        BTreeSet::from([$(stringify!($type).replace([' ', '\n'], "")),*])
    }};
}

fn listed() -> BTreeSet<String> {
    let mut listed = send_and_sync![
        leasehold::Barrier,
        leasehold::Client,
        leasehold::ClientBuilder,
        leasehold::Component,
        leasehold::CredentialRequest,
        leasehold::Credentials,
        leasehold::Diagnosis,
        leasehold::Election,
        leasehold::Error,
        leasehold::ErrorKind,
        leasehold::Fact,
        leasehold::Finding,
        leasehold::ForeignInfo,
        leasehold::Guard,
        leasehold::HolderInfo,
        leasehold::HolderMetadata,
        leasehold::Kind,
        leasehold::Latch,
        leasehold::LeaseId,
        leasehold::LockInfo,
        leasehold::Loss,
        leasehold::Mode,
        leasehold::Mutex,
        leasehold::MutexSet,
        leasehold::Observer,
        leasehold::OncePer,
        leasehold::Redlock,
        leasehold::RedlockBuilder,
        leasehold::ReentrantMutex,
        leasehold::RwLock,
        leasehold::Semaphore,
        leasehold::ServerRole,
        leasehold::SetGuard,
        leasehold::Severity,
        leasehold::StoreConfig,
        leasehold::Token,
        leasehold::UpgradableGuard,
        leasehold::WaiterInfo,
        leasehold::WriteGuard,
    ];
    listed.extend(send_and_sync![fence::Fence, fence::FencedFile, testing::TestStore]);
    listed.extend(send_and_sync![
        blocking::Barrier,
        blocking::Client,
        blocking::Election,
        blocking::Guard,
        blocking::Latch,
        blocking::Mutex,
        blocking::MutexSet,
        blocking::Observer,
        blocking::OncePer,
        blocking::ReentrantMutex,
        blocking::RwLock,
        blocking::Semaphore,
        blocking::SetGuard,
        blocking::UpgradableGuard,
        blocking::WriteGuard,
    ]);
    listed.into_iter().map(|name| name.trim_start_matches("leasehold::").to_owned()).collect()
}

fn is_type(name: &str) -> bool {
    name.starts_with(char::is_uppercase) && !name.chars().all(|c| c.is_uppercase() || c == '_')
}

/// The types that a file re-exports.
fn re_exported(text: &str) -> BTreeSet<String> {
    let uses = text.split("\npub use ").skip(1).filter_map(|rest| rest.split_once(';')).map(|(what, _)| what);
    let names = uses.flat_map(|what| {
        let names = what.split_once('{').map_or_else(
            || what.rsplit("::").next().unwrap_or(what).to_owned(),
            |(_, names)| names.trim_end_matches('}').to_owned(),
        );
        names.split(',').map(|name| name.trim().to_owned()).collect::<Vec<_>>()
    });
    names.filter(|name| is_type(name)).collect()
}

/// The types that a file declares as public.
fn declared(text: &str) -> BTreeSet<String> {
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum ")));
    lines
        .map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned())
        .collect()
}

#[test]
fn every_public_type_is_send_and_sync() {
    let source = |path: &str| {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(path)).unwrap()
    };
    let mut public = re_exported(&source("lib.rs"));
    assert!(
        public.contains("Client") && public.contains("WriteGuard"),
        "lib.rs is written in another way: {public:?}"
    );
    public.extend(re_exported(&source("fence.rs")).into_iter().map(|name| format!("fence::{name}")));
    public.extend(declared(&source("testing.rs")).into_iter().map(|name| format!("testing::{name}")));
    let of_blocking = re_exported(&source("blocking.rs"));
    let of_blocking = of_blocking.into_iter().chain(declared(&source("blocking.rs")));
    public.extend(of_blocking.map(|name| format!("blocking::{name}")));
    let listed = listed();
    let missing: Vec<_> = public.difference(&listed).collect();
    assert!(missing.is_empty(), "add these to the list: {missing:?}");
    let gone: Vec<_> = listed.difference(&public).collect();
    assert!(gone.is_empty(), "these are not found in the sources any more: {gone:?}");
}

#[test]
fn views_compare_and_errors_clone() {
    fn proven<T: Clone + PartialEq + std::fmt::Debug>() {}
    proven::<leasehold::LockInfo>();
    proven::<leasehold::HolderInfo>();
    proven::<leasehold::WaiterInfo>();
    proven::<leasehold::ForeignInfo>();
    proven::<leasehold::Diagnosis>();
    proven::<leasehold::Component>();
    proven::<leasehold::Finding>();
    proven::<leasehold::Fact>();
    proven::<leasehold::Severity>();
    proven::<leasehold::Mode>();
    proven::<leasehold::HolderMetadata>();
    proven::<leasehold::ErrorKind>();
    fn cloned<T: Clone + std::error::Error>() {}
    cloned::<leasehold::Error>();
}
