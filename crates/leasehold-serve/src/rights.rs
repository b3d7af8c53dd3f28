//! What a caller may do: its rights, and the names of the locks to which they apply.

/// Something that a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    /// States, metrics and events. Every token has it.
    Read,
    /// Acquire, renew and release.
    Write,
    /// Release the lease of another caller.
    Force,
}

impl Right {
    pub(crate) const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Force];

    /// The word of a token file and of the API.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Force => "force",
        }
    }
}

/// A set of rights. Reading is in every set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights {
    write: bool,
    force: bool,
}

impl Rights {
    pub(crate) const READ: Self = Self { write: false, force: false };
    pub(crate) const WRITE: Self = Self { write: true, force: false };
    pub(crate) const ALL: Self = Self { write: true, force: true };

    /// Parses words that commas separate. `None` if one of them is no right.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut rights = Self::READ;
        for word in text.split(',') {
            match Right::ALL.into_iter().find(|right| right.as_str() == word)? {
                Right::Read => {}
                Right::Write => rights.write = true,
                Right::Force => rights.force = true,
            }
        }
        Some(rights)
    }

    pub(crate) fn has(self, right: Right) -> bool {
        match right {
            Right::Read => true,
            Right::Write => self.write,
            Right::Force => self.force,
        }
    }

    fn covers(self, other: Self) -> bool {
        Right::ALL.into_iter().all(|right| self.has(right) || !other.has(right))
    }
}

/// What the callers of one name may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) name: String,
    pub(crate) rights: Rights,
    /// Beginnings of lock names, in order. Empty: all names.
    prefixes: Vec<String>,
}

impl Profile {
    pub(crate) fn new(name: impl Into<String>, rights: Rights, prefixes: &[&str]) -> Self {
        let mut prefixes: Vec<String> = prefixes.iter().map(|&prefix| prefix.to_owned()).collect();
        prefixes.sort();
        prefixes.dedup();
        Self { name: name.into(), rights, prefixes }
    }

    pub(crate) fn prefixes(&self) -> &[String] {
        &self.prefixes
    }

    pub(crate) fn has_all_names(&self) -> bool {
        self.prefixes.is_empty()
    }

    /// Whether the rights apply to the lock with this name, of any kind.
    pub(crate) fn has_name(&self, lock: &str) -> bool {
        self.has_all_names() || self.prefixes.iter().any(|prefix| lock.starts_with(prefix.as_str()))
    }

    /// Whether this allows everything that the other one allows.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let has_names = match other.has_all_names() {
            true => self.has_all_names(),
            false => other.prefixes.iter().all(|prefix| self.has_name(prefix)),
        };
        has_names && self.rights.covers(other.rights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_words_and_writing_does_not_include_force() {
        let known = |text| {
            let rights = Rights::parse(text)?;
            Some(Right::ALL.map(|right| rights.has(right)))
        };
        assert_eq!(known("read"), Some([true, false, false]));
        assert_eq!(known("write"), Some([true, true, false]));
        assert_eq!(known("force"), Some([true, false, true]));
        assert_eq!(known("force,read,write"), Some([true, true, true]));
        for wrong in ["", ",", "write,", "Write", "write force", "write, force", "admin", "write;force"] {
            assert_eq!(known(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn prefix_is_the_beginning_of_the_name_byte_by_byte() {
        let of = |prefixes: &[&str]| Profile::new("a", Rights::READ, prefixes);
        let jobs = of(&["jobs:", "\u{e4}"]);
        for (name, is_allowed) in [
            ("jobs:", true),
            ("jobs:1", true),
            ("\u{e4}b", true),
            ("jobs", false),
            ("Jobs:1", false),
            (" jobs:1", false),
            ("a\u{308}b", false),
            ("", false),
        ] {
            assert_eq!(jobs.has_name(name), is_allowed, "{name}");
            assert!(of(&[]).has_name(name));
        }
    }

    #[test]
    fn profile_covers_what_allows_no_more() {
        let of = |rights, prefixes: &[&str]| Profile::new("a", rights, prefixes);
        let (read, write, all) = (Rights::READ, Rights::WRITE, Rights::ALL);
        for (now, before, is_covered) in [
            (of(all, &[]), of(write, &["a"]), true),
            (of(write, &["a"]), of(write, &["b", "a"]), false),
            (of(write, &["b", "a"]), of(write, &["a"]), true),
            (of(write, &["a"]), of(write, &["ab"]), true),
            (of(write, &["ab"]), of(write, &["a"]), false),
            (of(write, &["a"]), of(write, &[]), false),
            (of(read, &[]), of(write, &[]), false),
            (of(write, &[]), of(all, &[]), false),
            (of(write, &[]), of(write, &[]), true),
        ] {
            assert_eq!(now.covers(&before), is_covered, "{now:?} {before:?}");
        }
    }
}
