//! The rules of proxies and managed servers for scripts.

/// Goes before a script, which may then do only what every known proxy and managed server allows.
pub const SCRIPT_RULES: &str = include_str!("script_rules.lua");
