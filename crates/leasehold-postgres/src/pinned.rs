//! Statements whose meaning no `search_path` changes.
//!
//! A server looks for an operator, a function or a type without a schema in all schemas of the path, and takes the one that
//! fits its arguments best. Another role may be allowed to create it in one of these schemas, and then its code runs with the
//! rights of the role that sends the statement. The setting `search_path` is no remedy by itself: a pooler may give each
//! statement a session that does not have it.

use std::iter::Peekable;
use std::str::CharIndices;

/// Calls that the grammar knows. It names their functions with their schema.
const GRAMMAR: [&str; 4] = ["coalesce", "extract", "greatest", "least"];

/// Characters of operators.
const OPERATOR: &str = "+-*/<>=~!@#%^&|";

/// A statement that names the schema of each operator, function and type. Connections send no other ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pinned(String);

impl Pinned {
    /// Puts `pg_catalog` before every name without a schema, but those of tables, which must have one.
    ///
    /// Keywords are in upper case; only a call has its parenthesis directly behind its name. All operators with a schema bind
    /// alike, tighter than AND and from left to right: where that is not meant, the statement has parentheses.
    #[must_use]
    pub fn new(statement: &str) -> Self {
        Self(Writer::default().write(statement))
    }

    /// Statements that are sent as one text, for which the path is set. The server reads no further after an error, so none
    /// of them runs without it.
    pub(super) fn transaction(statements: &str) -> Self {
        Self(format!("BEGIN; SET LOCAL search_path = pg_catalog, pg_temp; {statements} COMMIT"))
    }

    /// Any text, for tests.
    #[cfg(test)]
    pub(super) fn as_is(statement: &str) -> Self {
        Self(statement.to_owned())
    }

    /// The statement.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Writes a statement again, with the schemas.
#[derive(Default)]
struct Writer {
    written: String,
    /// How many parentheses and CASEs are open.
    depth: usize,
    /// The depth of the SET whose `=` assign.
    assigns_at: Option<usize>,
}

impl Writer {
    fn write(mut self, statement: &str) -> String {
        let mut chars = statement.char_indices().peekable();
        while let Some((at, char)) = chars.next() {
            match char {
                '\'' | '"' => {
                    self.written.push(char);
                    self.written.push_str(take(statement, &mut chars, at + 1, |next| next != char));
                    self.written.extend(chars.next().map(|(_, end)| end));
                }
                'a'..='z' | 'A'..='Z' | '_' => {
                    let is_word = |next: char| next.is_ascii_alphanumeric() || next == '_';
                    let word = take(statement, &mut chars, at, is_word);
                    let is_call = chars.peek().is_some_and(|(_, next)| *next == '(');
                    self.word(word, is_call);
                }
                _ if OPERATOR.contains(char) => {
                    let operator = take(statement, &mut chars, at, |next| OPERATOR.contains(next));
                    self.operator(operator);
                }
                _ => self.other(char),
            }
        }
        self.written
    }

    fn word(&mut self, word: &str, is_call: bool) {
        match word {
            "SET" => self.assigns_at = Some(self.depth),
            "FROM" | "WHERE" | "RETURNING" if self.assigns_at == Some(self.depth) => self.assigns_at = None,
            "CASE" => self.depth += 1,
            "END" => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        let is_keyword = word.starts_with(|first: char| first.is_ascii_uppercase());
        let is_name = !is_keyword && !GRAMMAR.contains(&word) && !self.written.ends_with('.');
        if self.written.ends_with("::") || is_call && is_name {
            self.written.push_str("pg_catalog.");
        }
        self.written.push_str(word);
    }

    fn operator(&mut self, operator: &str) {
        let is_assignment = operator == "=" && self.assigns_at == Some(self.depth);
        let is_all = operator == "*" && (self.written.ends_with('(') || self.written.ends_with("SELECT "));
        if is_assignment || is_all {
            self.written.push_str(operator);
        } else {
            self.written.push_str("OPERATOR(pg_catalog.");
            self.written.push_str(operator);
            self.written.push(')');
        }
    }

    fn other(&mut self, char: char) {
        match char {
            '(' => self.depth += 1,
            ')' => self.depth = self.depth.saturating_sub(1),
            ';' => self.assigns_at = None,
            _ => {}
        }
        self.written.push(char);
    }
}

/// The text from here to the first letter that does not belong to it.
fn take<'s>(
    text: &'s str,
    chars: &mut Peekable<CharIndices<'_>>,
    from: usize,
    belongs: impl Fn(char) -> bool,
) -> &'s str {
    while chars.next_if(|(_, next)| belongs(*next)).is_some() {}
    let end = chars.peek().map_or(text.len(), |(at, _)| *at);
    &text[from..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operator_function_and_type_gets_its_schema() {
        for (statement, pinned) in [
            ("SELECT a + 1", "SELECT a OPERATOR(pg_catalog.+) 1"),
            ("SELECT count(*), greatest(a, 'f(x)=')", "SELECT pg_catalog.count(*), greatest(a, 'f(x)=')"),
            ("SELECT $1::int8[] <> ALL (b)", "SELECT $1::pg_catalog.int8[] OPERATOR(pg_catalog.<>) ALL (b)"),
            ("SELECT s.f(a)::bit(64)::int8", "SELECT s.f(a)::pg_catalog.bit(64)::pg_catalog.int8"),
            (
                "UPDATE s.t SET a = CASE WHEN b = 1 THEN 2 END, (c, d) = (SELECT e, f FROM s.u WHERE e = 1) WHERE a = 3",
                "UPDATE s.t SET a = CASE WHEN b OPERATOR(pg_catalog.=) 1 THEN 2 END, (c, d) = (SELECT e, f FROM s.u \
                 WHERE e OPERATOR(pg_catalog.=) 1) WHERE a OPERATOR(pg_catalog.=) 3",
            ),
            (
                "SET a = 'b'; SELECT 'it''s' = f()",
                "SET a = 'b'; SELECT 'it''s' OPERATOR(pg_catalog.=) pg_catalog.f()",
            ),
            ("INSERT INTO s.t (a) VALUES (1)", "INSERT INTO s.t (a) VALUES (1)"),
        ] {
            assert_eq!(Pinned::new(statement).as_str(), pinned);
        }
    }
}
