//! Text from other clients.

/// Escapes characters that have no glyph, as `\u{202e}`: text from other clients must not control this terminal, and a name must not
/// look like another. What is escaped already stays as it is.
pub(crate) fn printable(text: &str) -> String {
    escaped(text, char::is_control)
}

/// As [`printable`], for text of several lines.
pub(crate) fn printable_lines(text: &str) -> String {
    escaped(text, |c| c.is_control() && c != '\n')
}

fn escaped(text: &str, is_control: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_control(c) || is_invisible(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Whether a character changes the order of others, ends a line, or is not shown at all: Unicode's
/// `Default_Ignorable_Code_Point`, and the two separators.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{AD}' | '\u{34F}' | '\u{61C}' | '\u{115F}'..='\u{1160}' | '\u{17B4}'..='\u{17B5}'
        | '\u{180B}'..='\u{180F}' | '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2060}'..='\u{206F}'
        | '\u{3164}' | '\u{FE00}'..='\u{FE0F}' | '\u{FEFF}' | '\u{FFA0}' | '\u{FFF0}'..='\u{FFF8}'
        | '\u{1BCA0}'..='\u{1BCA3}' | '\u{1D173}'..='\u{1D17A}' | '\u{E0000}'..='\u{E0FFF}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_are_not_shown_as_themselves_are_escaped() {
        assert_eq!(printable("a\u{1b}[31m\n"), "a\\u{1b}[31m\\u{a}");
        assert_eq!(printable_lines("a\u{1b}[31m\nb"), "a\\u{1b}[31m\nb");
        assert_eq!(printable("\\u{202e}"), "\\u{202e}", "it may be called twice");
        for code in (0x202A..=0x202E).chain(0x2066..=0x2069).chain([0x200E, 0x200F, 0x61C, 0x200B, 0xFEFF]) {
            let hidden = char::from_u32(code).unwrap();
            assert_eq!(printable(&format!("a{hidden}b")), format!("a\\u{{{code:x}}}b"));
        }
        let plain = "d\u{e9}ploy \u{5e9}\u{5dc}\u{5d5}\u{5dd} e\u{301} \u{1f512} a\\b";
        assert_eq!(printable(plain), plain);
    }
}
