//! Text from other clients.

/// Replaces control characters: text from other clients must not control this terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect()
}
