//! Every public type can move to another thread and be shared between threads, and none is missing from this list.

use std::collections::BTreeSet;

/// A type by its path below the crate, and a proof at compile time.
macro_rules! send_and_sync {
    ($($name:ident),* $(,)?) => {{
        fn proven<T: Send + Sync + 'static>() {}
        $(proven::<leasehold_serve::$name>();)*
        BTreeSet::from([$(stringify!($name)),*])
    }};
}

/// The types that this file re-exports.
fn re_exported(text: &str) -> BTreeSet<&str> {
    let uses = text.split("\npub use ").skip(1).filter_map(|rest| rest.split_once(';')).map(|(what, _)| what);
    let names = uses.flat_map(|what| what.split(|c: char| !c.is_alphanumeric() && c != '_'));
    names.filter(|name| name.starts_with(char::is_uppercase) && name.contains(char::is_lowercase)).collect()
}

#[test]
fn every_public_type_is_send_and_sync() {
    let listed =
        send_and_sync![Config, Control, FileStamp, Limits, Listen, Notices, Server, StartError, Tls, Tokens];
    assert_eq!(re_exported(include_str!("../src/lib.rs")), listed, "lib.rs and the list differ");
}

#[test]
fn errors_and_settings_can_be_cloned() {
    fn proven<T: Clone + std::fmt::Debug>() {}
    proven::<leasehold_serve::Config>();
    fn error<T: Clone + PartialEq + std::error::Error>() {}
    error::<leasehold_serve::StartError>();
}

#[test]
fn re_exports_are_found() {
    let text =
        "//! a\npub use a::{B, C_D, Ef};\npub use self::g::h;\nuse i::Jk;\npub use l::{\n    Mn,\n};\n";
    assert_eq!(re_exported(text), BTreeSet::from(["Ef", "Mn"]));
}
