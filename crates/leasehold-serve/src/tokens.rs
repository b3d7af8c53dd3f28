//! Bearer tokens: the names of callers, and what they may do.

use std::fmt;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use leasehold::MAX_NAME_BYTES;
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use crate::rights::{Profile, Rights};

/// The minimum length of a token in bytes. `openssl rand -hex 16` prints 32.
///
/// ```
/// let short = "a".repeat(leasehold_serve::MIN_TOKEN_BYTES - 1);
/// assert!(leasehold_serve::Tokens::default().add_read(&short).is_err());
/// ```
pub const MIN_TOKEN_BYTES: usize = 16;
/// The maximum length of a token in bytes.
const MAX_TOKEN_BYTES: usize = 1024;
/// The maximum length of a token's name in bytes.
const MAX_PROFILE_BYTES: usize = 64;
/// The maximum size of a token file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The form of a line. No message repeats a word of a line, because any of them may be a token in the wrong place.
const FORM: &str = "write NAME RIGHTS TOKEN [PREFIX...], with RIGHTS of read, write and force, for example `ci write,force TOKEN jobs:`";

/// The tokens that a server accepts.
///
/// A token file has one token per line: `NAME RIGHTS TOKEN [PREFIX...]`. The name stands for the caller in the state of locks, in
/// logs and in limits. The rights are `read`, `write` and `force`, which commas separate. Every token may read; `write` is the
/// right to acquire and release, and `force` the right to release the leases of others. With prefixes, the token is for locks whose
/// names begin with one of them. A name may have several tokens, with the same rights and prefixes, so that a token can be replaced.
/// A line `RIGHTS TOKEN` is for a token without a name. Empty lines and lines that begin with `#` are ignored.
///
/// ```
/// use leasehold_serve::Tokens;
///
/// let tokens = Tokens::parse("# the build\nci write 0123456789abcdef0123 jobs: builds:\nread fedcba98765432109876\n")?;
/// assert!(!tokens.is_empty());
/// assert!(Tokens::parse("ci write short").unwrap_err().contains("line 1"));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Default)]
pub struct Tokens {
    known: Vec<Known>,
}

#[derive(Clone)]
struct Known {
    secret: Vec<u8>,
    profile: Arc<Profile>,
    /// Its line of the file; none of a token from elsewhere.
    line: Option<usize>,
}

impl Tokens {
    /// Parses the text of a token file.
    ///
    /// ```
    /// let tokens = leasehold_serve::Tokens::parse("ci write 0123456789abcdef0123456789abcdef jobs:")?;
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
            let number = index + 1;
            let added = profile(line).and_then(|(profile, token)| tokens.add(profile, token, Some(number)));
            added.map_err(|what| format!("line {number}: {what}"))?;
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
        file.by_ref().take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(format!("{shown}: it has more than {MAX_FILE_BYTES} bytes"));
        }
        Self::parse(&text).map_err(|what| format!("{shown}: {what}"))
    }

    /// Adds a token that may read, with the name `read`.
    ///
    /// ```
    /// let mut tokens = leasehold_serve::Tokens::default();
    /// tokens.add_read("0123456789abcdef0123456789abcdef")?;
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If it is too short, too long, or has characters that a header can't have. If it is there, or its name is, with other rights or
    /// with prefixes.
    pub fn add_read(&mut self, token: &str) -> Result<(), String> {
        self.add(Profile::new("read", Rights::READ, &[]), token, None)
    }

    /// As [`Self::add_read`], for a token that may also acquire and release, with the name `write`.
    ///
    /// # Errors
    ///
    /// As [`Self::add_read`].
    pub fn add_write(&mut self, token: &str) -> Result<(), String> {
        self.add(Profile::new("write", Rights::WRITE, &[]), token, None)
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

    fn add(&mut self, profile: Profile, token: &str, line: Option<usize>) -> Result<(), String> {
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
        if let Some(same) = self.known.iter().find(|known| known.secret == token.as_bytes()) {
            return Err(format!("the token is {}: remove one of them", same.place()));
        }
        let of_name = self.known.iter().find(|known| known.profile.name == profile.name);
        if let Some(other) = of_name.filter(|known| *known.profile != profile) {
            return Err(format!(
                "the name is {}, with other rights or prefixes: use another name, or make them equal",
                other.place()
            ));
        }
        let profile = of_name.map_or_else(|| Arc::new(profile), |known| known.profile.clone());
        self.known.push(Known { secret: token.as_bytes().to_owned(), profile, line });
        Ok(())
    }

    /// What this token stands for. The time does not depend on the bytes of the tokens, only on their number and lengths.
    pub(crate) fn find(&self, presented: &[u8]) -> Option<&Arc<Profile>> {
        let mut found = u64::MAX;
        for (index, known) in (0..).zip(&self.known) {
            found.conditional_assign(&index, known.secret.ct_eq(presented));
        }
        self.known.get(usize::try_from(found).ok()?).map(|known| &known.profile)
    }

    /// Whether there are tokens of more than one name.
    pub(crate) fn has_several_names(&self) -> bool {
        let mut names = self.known.iter().map(|known| &known.profile.name);
        let first = names.next();
        names.any(|name| Some(name) != first)
    }
}

impl Known {
    fn place(&self) -> String {
        match self.line {
            Some(line) => format!("also in line {line}"),
            None => "also that of another setting".to_owned(),
        }
    }
}

/// The profile and the token of a line.
fn profile(line: &str) -> Result<(Profile, &str), String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let rights = |word| Rights::parse(word).ok_or_else(|| FORM.to_owned());
    match *words.as_slice() {
        // The rights are its name.
        [word, token] => Ok((Profile::new(word, rights(word)?, &[]), token)),
        [name, word, token, ref prefixes @ ..] => {
            let rights = rights(word)?;
            if name.len() > MAX_PROFILE_BYTES || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(format!("a name has 1 to {MAX_PROFILE_BYTES} printable ASCII characters"));
            }
            if prefixes.iter().any(|prefix| prefix.len() > MAX_NAME_BYTES) {
                return Err(format!("a prefix has at most {MAX_NAME_BYTES} bytes, as a lock's name"));
            }
            Ok((Profile::new(name, rights, prefixes), token))
        }
        _ => Err(FORM.to_owned()),
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

    fn rights(text: &str, token: &[u8]) -> Option<(String, Rights, usize)> {
        let tokens = Tokens::parse(text).unwrap();
        let profile = tokens.find(token)?;
        Some((profile.name.clone(), profile.rights, profile.prefixes().len()))
    }

    #[test]
    fn token_has_the_name_rights_and_prefixes_of_its_line() {
        let text = "# a\n\nread aaaaaaaaaaaaaaaa\r\n write  bbbbbbbbbbbbbbbb \n\
                    ci write,force cccccccccccccccc jobs: b\u{e4} jobs:\nci force,write dddddddddddddddd b\u{e4}  jobs:";
        for (token, name, expected, prefixes) in [
            (b"aaaaaaaaaaaaaaaa", "read", Rights::READ, 0),
            (b"bbbbbbbbbbbbbbbb", "write", Rights::WRITE, 0),
            (b"cccccccccccccccc", "ci", Rights::ALL, 2),
            (b"dddddddddddddddd", "ci", Rights::ALL, 2),
        ] {
            assert_eq!(rights(text, token), Some((name.to_owned(), expected, prefixes)));
        }
        for wrong in [&b""[..], b"aaaaaaaaaaaaaaa", b"aaaaaaaaaaaaaaaaa", b"aaaaaaaaaaaaaaab", &[0xff; 4096]]
        {
            assert_eq!(rights(text, wrong), None);
        }
        assert_eq!(rights("", b""), None);
    }

    #[test]
    fn names_are_counted_and_not_tokens() {
        let is_several = |text| Tokens::parse(text).unwrap().has_several_names();
        assert!(!is_several("") && !is_several("ci write aaaaaaaaaaaaaaaa\nci write bbbbbbbbbbbbbbbb"));
        assert!(is_several("ci write aaaaaaaaaaaaaaaa\nread bbbbbbbbbbbbbbbb"));
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
    fn wrong_line_is_named_without_its_words() {
        let long = format!("{} write {}", "secret".repeat(11), "a".repeat(16));
        for (text, says) in [
            ("read\n", "line 1: write NAME RIGHTS TOKEN"),
            ("\nsecret aaaaaaaaaaaaaaaa", "line 2: write NAME RIGHTS TOKEN"),
            ("write secret", "line 1: a token has 16 to 1024 characters, this one has 6"),
            ("write secretsecretsecret secret secret", "line 1: write NAME RIGHTS TOKEN"),
            ("ci write,secret aaaaaaaaaaaaaaaa", "line 1: write NAME RIGHTS TOKEN"),
            ("ci write secretsecretsecret\u{e4}", "line 1: a token has only printable ASCII"),
            ("secret\u{e4} write aaaaaaaaaaaaaaaa", "line 1: a name has 1 to 64 printable ASCII"),
            (&long, "line 1: a name has 1 to 64 printable ASCII"),
            (
                &format!("ci write aaaaaaaaaaaaaaaa {}", "secret".repeat(100)),
                "a prefix has at most 512 bytes",
            ),
            (
                "ci read secretsecretsecret\n\nops write secretsecretsecret",
                "line 3: the token is also in line 1",
            ),
            ("ci read secretsecretsecret\nci read secretsecretsecret", "line 2: the token is also in line 1"),
            (
                "secret read aaaaaaaaaaaaaaaa\nsecret write bbbbbbbbbbbbbbbb",
                "line 2: the name is also in line 1",
            ),
            (
                "secret read aaaaaaaaaaaaaaaa a\nsecret read bbbbbbbbbbbbbbbb a b",
                "line 2: the name is also in line 1",
            ),
            (
                "write aaaaaaaaaaaaaaaa\nwrite write bbbbbbbbbbbbbbbb secret",
                "line 2: the name is also in line 1",
            ),
        ] {
            let error = Tokens::parse(text).unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{text}: {error}");
        }
        let mut tokens = Tokens::parse("read aaaaaaaaaaaaaaaa").unwrap();
        assert!(tokens.add_write("aaaaaaaaaaaaaaaa").unwrap_err().contains("also in line 1"));
        tokens.add_write("bbbbbbbbbbbbbbbb").unwrap();
        assert!(tokens.add_read("bbbbbbbbbbbbbbbb").unwrap_err().contains("another setting"));
    }

    #[test]
    fn file_without_an_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let text = "# a\n".repeat(1 << 18);
        for (more, is_refused) in [("", false), ("#", true)] {
            std::fs::write(&path, format!("{text}{more}")).unwrap();
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
            assert_eq!(Tokens::from_file(&path).is_err(), is_refused);
        }
        assert!(Tokens::from_file(folder.path()).is_err(), "a folder");
    }
}
