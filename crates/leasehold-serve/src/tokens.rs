//! Bearer tokens: who may read, and who may acquire and release.

use std::fmt;
use std::path::Path;

use subtle::{Choice, ConstantTimeEq as _};

/// The minimum length of a token in bytes. `openssl rand -hex 16` prints 32.
///
/// ```
/// let short = "a".repeat(leasehold_serve::MIN_TOKEN_BYTES - 1);
/// assert!(leasehold_serve::Tokens::default().add_read(&short).is_err());
/// ```
pub const MIN_TOKEN_BYTES: usize = 16;
/// The maximum length of a token in bytes.
const MAX_TOKEN_BYTES: usize = 1024;

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    /// No token needed: the dashboard's page, which has no data, and the description of the API.
    Public,
    /// States, metrics and events.
    Read,
    /// Acquire, renew, release and sessions.
    Write,
}

/// The tokens that a server accepts.
///
/// A token file has one token per line, after the word `read` or `write`. Empty lines and lines that begin with `#` are
/// ignored. A `write` token may also read.
///
/// ```
/// let tokens = leasehold_serve::Tokens::parse("# the dashboard\nread 0123456789abcdef0123\n").unwrap();
/// assert!(!tokens.is_empty());
/// assert!(leasehold_serve::Tokens::parse("write short").unwrap_err().contains("line 1"));
/// ```
#[derive(Clone, Default)]
pub struct Tokens {
    known: Vec<(Access, Vec<u8>)>,
}

impl Tokens {
    /// Parses the text of a token file.
    ///
    /// ```
    /// let tokens = leasehold_serve::Tokens::parse("write 0123456789abcdef0123456789abcdef")?;
    /// assert!(!tokens.is_empty());
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A message that names the line. It never contains a token.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut tokens = Self::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let at = |what: String| format!("line {}: {what}", index + 1);
            let (word, token) = line
                .split_once(char::is_whitespace)
                .ok_or_else(|| at("write `read TOKEN` or `write TOKEN`".to_owned()))?;
            let add = match word {
                "read" => tokens.add_read(token.trim()),
                "write" => tokens.add_write(token.trim()),
                _ => Err("a line begins with `read` or `write`".to_owned()),
            };
            add.map_err(at)?;
        }
        Ok(tokens)
    }

    /// Reads a token file.
    ///
    /// ```no_run
    /// let tokens = leasehold_serve::Tokens::from_file("/etc/leasehold/tokens".as_ref())?;
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A message that names the file and the line, or why the file can't be read. A file that all users may read, its group may
    /// change, or another user than root and this one owns, is an error.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let unreadable = |error: std::io::Error| format!("{shown}: it can't be read: {error}");
        let mut file = std::fs::File::open(path).map_err(unreadable)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt as _;
            let found = file.metadata().map_err(unreadable)?;
            let (owner, own) = (found.uid(), rustix::process::geteuid().as_raw());
            if ![0, own].contains(&owner) {
                return Err(format!(
                    "{shown}: another user (uid {owner}) owns it, and can change the tokens: run chown {own} {shown}"
                ));
            }
            if found.mode() & 0o026 != 0 {
                return Err(format!(
                    "{shown}: other users can read or change the tokens: run chmod 600 {shown}, or 640 for a group that reads"
                ));
            }
        }
        let mut text = String::new();
        std::io::Read::read_to_string(&mut file, &mut text).map_err(unreadable)?;
        Self::parse(&text).map_err(|what| format!("{shown}: {what}"))
    }

    /// Adds a token that may read.
    ///
    /// ```
    /// let mut tokens = leasehold_serve::Tokens::default();
    /// tokens.add_read("0123456789abcdef0123456789abcdef")?;
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If it is too short, too long, or has characters that a header can't have.
    pub fn add_read(&mut self, token: &str) -> Result<(), String> {
        self.add(Access::Read, token)
    }

    /// As [`Self::add_read`], for a token that may also acquire and release.
    ///
    /// # Errors
    ///
    /// As [`Self::add_read`].
    pub fn add_write(&mut self, token: &str) -> Result<(), String> {
        self.add(Access::Write, token)
    }

    /// Adds the tokens of another set.
    ///
    /// ```
    /// # use leasehold_serve::Tokens;
    /// let mut tokens = Tokens::parse("read 0123456789abcdef0123456789abcdef")?;
    /// tokens.extend(Tokens::parse("write fedcba9876543210fedcba9876543210")?);
    /// # Ok::<(), String>(())
    /// ```
    pub fn extend(&mut self, other: Self) {
        self.known.extend(other.known);
    }

    /// Whether there is no token.
    ///
    /// ```
    /// assert!(leasehold_serve::Tokens::default().is_empty());
    /// ```
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Whether a token is both one that reads and one that writes. It may write, which is hardly meant.
    ///
    /// ```
    /// let tokens = leasehold_serve::Tokens::parse("read 0123456789abcdef0123\nwrite 0123456789abcdef0123")?;
    /// assert!(tokens.has_token_that_reads_and_writes());
    /// # Ok::<(), String>(())
    /// ```
    #[must_use]
    pub fn has_token_that_reads_and_writes(&self) -> bool {
        let mut reading = self.known.iter().filter(|(access, _)| *access == Access::Read);
        reading.any(|(_, token)| self.known.contains(&(Access::Write, token.clone())))
    }

    fn add(&mut self, access: Access, token: &str) -> Result<(), String> {
        if !(MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&token.len()) {
            let what = "openssl rand -hex 16 prints one";
            return Err(format!(
                "a token has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} characters, this one has {}: {what}",
                token.len()
            ));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("a token has only printable ASCII characters, and no spaces".to_owned());
        }
        self.known.push((access, token.as_bytes().to_owned()));
        Ok(())
    }

    /// What this token may do. The time does not depend on the bytes of the tokens, only on their number and lengths.
    pub(crate) fn access_of(&self, presented: &[u8]) -> Option<Access> {
        let (mut may_read, mut may_write) = (Choice::from(0), Choice::from(0));
        for (access, token) in &self.known {
            let is_equal = token.as_slice().ct_eq(presented);
            may_read |= is_equal;
            may_write |= is_equal & Choice::from(u8::from(*access == Access::Write));
        }
        match (bool::from(may_read), bool::from(may_write)) {
            (_, true) => Some(Access::Write),
            (true, false) => Some(Access::Read),
            (false, false) => None,
        }
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokens({})", self.known.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_has_the_access_of_its_line() {
        let tokens = Tokens::parse("# a\n\nread aaaaaaaaaaaaaaaa\n write  bbbbbbbbbbbbbbbb \n").unwrap();
        assert_eq!(tokens.access_of(b"aaaaaaaaaaaaaaaa"), Some(Access::Read));
        assert_eq!(tokens.access_of(b"bbbbbbbbbbbbbbbb"), Some(Access::Write));
        for wrong in [&b""[..], b"aaaaaaaaaaaaaaa", b"aaaaaaaaaaaaaaaaa", b"aaaaaaaaaaaaaaab", &[0xff; 4096]]
        {
            assert_eq!(tokens.access_of(wrong), None);
        }
    }

    #[test]
    fn token_that_reads_and_writes_is_found() {
        for (text, is_found) in [
            ("read aaaaaaaaaaaaaaaa\nwrite aaaaaaaaaaaaaaaa", true),
            ("write aaaaaaaaaaaaaaaa\nread bbbbbbbbbbbbbbbb\nread aaaaaaaaaaaaaaaa", true),
            ("write aaaaaaaaaaaaaaaa\nread bbbbbbbbbbbbbbbb\nread bbbbbbbbbbbbbbbb", false),
            ("write aaaaaaaaaaaaaaaa\nwrite aaaaaaaaaaaaaaaa", false),
        ] {
            assert_eq!(Tokens::parse(text).unwrap().has_token_that_reads_and_writes(), is_found, "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn file_that_others_can_read_or_write_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, "write aaaaaaaaaaaaaaaa\n").unwrap();
        for (mode, is_refused) in
            [(0o602, true), (0o604, true), (0o620, true), (0o660, true), (0o600, false), (0o640, false)]
        {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            match Tokens::from_file(&path) {
                Err(error) => assert!(is_refused && error.contains("chmod 600"), "{mode:o}: {error}"),
                Ok(_) => assert!(!is_refused, "{mode:o}"),
            }
        }
        // Only root can give a file away.
        if std::os::unix::fs::chown(&path, Some(12_345), None).is_ok() {
            let Err(error) = Tokens::from_file(&path) else { panic!("its owner can change the tokens") };
            assert!(error.contains("uid 12345") && error.contains("chown"), "{error}");
        }
    }

    #[test]
    fn wrong_line_is_named_without_its_token() {
        for (text, says) in [
            ("read\n", "line 1: write `read TOKEN`"),
            ("\nadmin aaaaaaaaaaaaaaaa", "line 2: a line begins with"),
            ("write secret", "line 1: a token has 16 to 1024 characters, this one has 6"),
            ("write secret secret secret", "no spaces"),
        ] {
            let error = Tokens::parse(text).unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{error}");
        }
    }
}
